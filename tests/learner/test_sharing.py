"""Rows that begin alike: found, laid out in one row, and attended to as if each lay alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.learner.batching import (
    Family,
    family_micro_batches,
    family_token_micro_batches,
    sample_cost,
)
from openrlhf.learner.packing import build_inputs, build_last_token_inputs
from openrlhf.learner.shared_attention import SharedAttention, follow, sees
from openrlhf.learner.sharing import MIN_PREFIX, find_families, lay_out, worthwhile_families
from support.learner_sharing_cases import rows_batch, sharing_batch


def batch_of(rows: list[list[int]]) -> Batch:
    return rows_batch(rows, [[place > 0 for place in range(len(row))] for row in rows])


HEAD = list(range(10, 20))


def test_families_of_a_batch() -> None:
    assert find_families(sharing_batch()) == [
        Family((0, 1, 2, 3), 20),
        Family((4, 5, 6), 13),
        Family((7, 8), 19),
        Family((9,), 13),
    ]


def test_rows_with_a_short_beginning_in_common_stay_alone() -> None:
    rows = [[*HEAD[: MIN_PREFIX - 1], last] for last in (1, 2)]
    assert find_families(batch_of(rows)) == [Family((0,), MIN_PREFIX), Family((1,), MIN_PREFIX)]
    assert worthwhile_families(batch_of(rows)) is None


def test_a_common_beginning_of_two_prompts_is_given_up_for_the_prompts() -> None:
    # both groups begin with HEAD; one family of four rows would save 3 x 10 tokens, two of two rows 2 x 16
    rows = [[*HEAD, *([kind] * 6), last] for kind in (1, 2) for last in (3, 4)]
    assert find_families(batch_of(rows)) == [Family((0, 1), 16), Family((2, 3), 16)]
    rows = [[*HEAD, kind, last] for kind in (1, 2) for last in (3, 4)]
    assert find_families(batch_of(rows)) == [Family((0, 1, 2, 3), 10)]


def test_little_in_common_is_not_worth_a_row() -> None:
    long = [[*HEAD, *[kind] * 80] for kind in (1, 2)]
    assert len(find_families(batch_of(long))) == 1
    assert worthwhile_families(batch_of(long)) is None  # 10 of 180
    assert worthwhile_families(batch_of([row[:20] for row in long])) == [Family((0, 1), 10)]
    assert worthwhile_families(batch_of([HEAD])) is None


def best_saving(rows: list[list[int]]) -> int:
    """Most tokens that any division of the rows into families spares, by trying all."""
    if not rows:
        return 0
    first, rest = rows[0], rows[1:]
    best = best_saving(rest)
    for count in range(1, len(rest) + 1):
        for others in itertools.combinations(range(len(rest)), count):
            members = [first, *(rest[i] for i in others)]
            prefix = next(
                (n for n in range(min(map(len, members)), 0, -1) if all(m[:n] == first[:n] for m in members)), 0
            )
            if prefix >= MIN_PREFIX:
                left = [rest[i] for i in range(len(rest)) if i not in others]
                best = max(best, count * prefix + best_saving(left))
    return best


@given(st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4), min_size=1, max_size=6))
def test_families_save_as_much_as_any_division(tails: list[list[int]]) -> None:
    rows = [[*HEAD[: MIN_PREFIX - 1], *tail] for tail in tails]
    families = find_families(batch_of(rows))
    lengths = [len(row) for row in rows]
    assert sorted(row for family in families for row in family.rows) == list(range(len(rows)))
    for family in families:
        assert len({tuple(rows[row][: family.prefix]) for row in family.rows}) == 1
    assert sum(lengths) - sum(f.tokens(lengths) for f in families) == best_saving(rows)


def test_layout_of_two_families() -> None:
    rows = [[*HEAD, 1, 2], [*HEAD, 3], [7, 8]]
    batch = batch_of(rows)
    inputs = build_inputs(batch, batch.action_mask, packed=False, families=find_families(batch))
    # blocks by length of the tails: the row alone has none
    assert inputs.input_ids.tolist() == [[7, 8, *HEAD, 1, 2, 3]]
    assert inputs.position_ids.tolist() == [[0, 1, *range(10), 10, 11, 10]]
    assert inputs.token_weights.tolist() == [[1, 1, *[2] * 10, 1, 1, 1]]
    assert inputs.targets.tolist() == [*HEAD[1:], 1, 2, *HEAD[1:], 3, 8]
    # the state of the prompt's last token, at place 11, predicts the first token of both answers
    assert inputs.select.tolist() == [*range(2, 11), 11, 12, *range(2, 11), 11, 0]
    last = build_last_token_inputs(batch, packed=False, families=find_families(batch))
    assert last.select.tolist() == [13, 14, 1]


def test_one_state_with_several_targets_gets_all_their_gradients() -> None:
    batch = batch_of([[*HEAD, 1], [*HEAD, 2]])
    batch = batch.with_(action_mask=torch.arange(11).expand(2, -1) == 10)
    inputs = build_inputs(batch, batch.action_mask, packed=False, families=find_families(batch))
    assert inputs.select.tolist() == [9, 9]
    states = torch.zeros(12, requires_grad=True)
    states[inputs.select].sum().backward()
    assert states.grad is not None
    assert states.grad[9] == 2


groups = st.lists(
    st.tuples(st.integers(0, 14), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=4
)


@settings(max_examples=60)
@given(groups, st.sampled_from([None, 1, 3, 8]), st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.integers(0, 99))
def test_attention_is_that_of_rows_by_themselves(
    shapes: list[tuple[int, list[int]]], window: int | None, heads: tuple[int, int], seed: int
) -> None:
    rows: list[list[int]] = []
    families: list[Family] = []
    for number, (prefix, tails) in enumerate(shapes):
        prefix = max(prefix, 1 - min(tails))
        numbers = range(len(rows), len(rows) + len(tails))
        rows += [[*[number] * prefix, *[100 + row] * tail] for row, tail in zip(numbers, tails, strict=True)]
        families.append(Family(tuple(numbers), prefix if len(tails) > 1 else prefix + tails[0]))
    batch = batch_of(rows)
    layout = lay_out(batch, families)
    g = torch.Generator().manual_seed(seed)
    total = len(layout.cells)
    q, k, v = (torch.randn(1, n, total, 4, generator=g, dtype=torch.float64) for n in (heads[0], heads[1], heads[1]))
    weights = torch.randn(1, total, heads[0], 4, generator=g, dtype=torch.float64)

    def gradients(attend: object) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attend(*inputs)  # type: ignore[operator]
        (out * weights).sum().backward()
        return [out.detach(), *(t.grad for t in inputs if t.grad is not None)]

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        place = torch.arange(total)
        seen = torch.zeros(total, total, dtype=torch.bool)
        cells = torch.arange(batch.tokens.numel()).view(batch.tokens.shape)
        for row, cols in ((row, torch.arange(len(tokens))) for row, tokens in enumerate(rows)):
            assert torch.equal(
                batch.tokens.flatten()[layout.cells[layout.place(torch.full_like(cols, row), cols)]],
                batch.tokens.flatten()[cells[row, cols]],
            )
            at = layout.place(torch.full_like(cols, row), cols)
            near = (cols <= cols[:, None]) & (cols > cols[:, None] - (window or 999))
            seen[at[:, None], at] |= near
        # the same by the rule that flex attention is given
        none = torch.zeros((), dtype=torch.long)
        assert torch.equal(seen, sees(layout, window)(none, none, place[:, None], place[None]))
        key, value = (t.repeat_interleave(heads[0] // heads[1], 1) for t in (key, value))
        scores = (query @ key.transpose(-1, -2) * 0.7).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attend = SharedAttention(layout, flex=False)
        return attend(torch.nn.Identity(), query, key, value, None, scaling=0.7, sliding_window=window)

    for got, want in zip(gradients(shared), gradients(dense), strict=True):
        assert float((got - want).abs().max()) < 1e-12


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # torch 2.13, on a CPU
def test_flex_attention_gives_the_same_forward_pass(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as integration

    def uncompiled(query: Tensor, key: Tensor, value: Tensor, training: bool, **options: object) -> object:
        return flex_attention(query, key, value, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", uncompiled)
    batch = sharing_batch()
    layout = lay_out(batch, find_families(batch))
    g = torch.Generator().manual_seed(0)
    for heads in ((4, 2), (3, 1)):
        found = []
        tensors = [torch.randn(1, n, len(layout.cells), 16, generator=g) for n in (heads[0], heads[1], heads[1])]
        for flex in (False, True):
            attend = SharedAttention(layout, flex=flex)
            q, k, v = tensors
            found.append(attend(torch.nn.Identity(), q, k, v, None, scaling=None, sliding_window=window))
        assert found[0].shape == found[1].shape
        assert float((found[0] - found[1]).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "option", [{"softcap": 50.0}, {"s_aux": torch.ones(2)}, {"dropout": 0.1}, {"is_causal": False}]
)
def test_what_a_layer_asks_for_is_never_ignored(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"its attention takes {next(iter(option))}"):
        follow(option)
    assert follow({"softcap": None, "dropout": 0.0, "is_causal": None, "sliding_window": 4}) == 4


def test_a_family_costs_its_prefix_once() -> None:
    family = Family((0, 1), 100)
    assert family.tokens([150, 120]) == 170
    assert family.cost([150, 120], 64) == pytest.approx(
        sample_cost(150, 64) + sample_cost(120, 64) - sample_cost(100, 64)
    )


def test_micro_batches_follow_the_families() -> None:
    families = [Family((0, 3, 5), 20), Family((1, 2, 4), 30)]
    lengths = [25, 40, 41, 22, 39, 23]
    assert family_micro_batches(families, lengths, 3) == [[1, 2, 4], [0, 3, 5]]
    assert family_micro_batches(families, lengths, 4) == [[0, 1, 2, 4], [3, 5]]
    # 30 + 9 + 10 + 11 and 20 + 5 + 2 + 3
    assert family_token_micro_batches(families, lengths, 60, hidden_size=64) == [[1, 2, 4], [0, 3, 5]]
    assert family_token_micro_batches(families, lengths, 90, hidden_size=64) == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="at least one sample"):
        family_micro_batches(families, lengths, 0)


@given(groups, st.integers(1, 60))
def test_token_plans_of_families_hold_every_row_once_within_the_budget(
    shapes: list[tuple[int, list[int]]], budget: int
) -> None:
    lengths: list[int] = []
    families: list[Family] = []
    for prefix, tails in shapes:
        families.append(Family(tuple(range(len(lengths), len(lengths) + len(tails))), prefix))
        lengths += [prefix + tail for tail in tails]
    plan = family_token_micro_batches(families, lengths, budget, hidden_size=8)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        inside = [Family(tuple(row for row in f.rows if row in part), f.prefix) for f in families]
        tokens = sum(f.tokens(lengths) for f in inside if f.rows)
        assert tokens <= budget or len(part) == 1 or all(lengths[row] == 0 for row in part)
