"""Rows that are cut over the ranks of a sequence group: the steps of two ranks are those of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.core.config import Truncation
from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.models import load_module
from openrlhf.learner.sequence_parallel import attention
from openrlhf.learner.sequence_parallel.attention import Kernel, SequenceAttention, SequenceParallel, by_heads
from openrlhf.learner.sequence_parallel.check import ruled_out
from openrlhf.learner.sequence_parallel.group import SequenceGroup
from openrlhf.learner.sequence_parallel.slicing import Shares, Slices
from openrlhf.learner.shared_check import ruled_out as sharing_ruled_out
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import save_tiny_model
from support.learner_ranks import RankResults, result
from support.learner_sequence_cases import SETUPS, check_same

RANK_CASES = {2: ["sequence_steps", "sequence_resume", "sequence_mistakes"], 1: ["sequence_steps"]}

CPU = torch.device("cpu")
PACKED = DsConfig(param_dtype="fp32", attn_implementation="sdpa", packing_samples=True)

on_ranks = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]


def with_ranks(test: Any) -> Any:
    for mark in on_ranks:
        test = mark(test)
    return test


@with_ranks
@pytest.mark.parametrize("name", SETUPS)
def test_two_ranks_take_the_steps_of_one(ranks: RankResults, name: str) -> None:
    want = result(ranks, "sequence_steps", 1)[0][str(SETUPS[name].alone)]
    for of_rank in result(ranks, "sequence_steps", 2):
        check_same(of_rank[name], want, task=SETUPS[name].task)


@with_ranks
def test_resumed_is_the_same_as_never_stopped(ranks: RankResults) -> None:
    for of_rank in result(ranks, "sequence_resume", 2):
        assert of_rank["resumed"]["metrics"]
        assert of_rank["resumed"]["weights"]
        assert of_rank["resumed"]["ema"]


@with_ranks
def test_a_checkpoint_fits_any_size_of_a_group(ranks: RankResults) -> None:
    for of_rank in result(ranks, "sequence_resume", 2):
        assert of_rank["difference at size 1"] < 1e-6


@with_ranks
def test_mistakes_are_named(ranks: RankResults) -> None:
    for messages in result(ranks, "sequence_mistakes", 2):
        assert "ranks of a sequence group got different samples" in messages["samples"]
        assert "`ds.ring_attn_size` 3 does not divide the 2 ranks" in messages["world"]
        assert "`ds.ring_attn_size` 2: the rows of" in messages["eager"]
        assert "'eager' has no place for it" in messages["eager"]
        assert "its states differ by" in messages["positions"]
        assert "1 of its 2 layers hand their attention over" in messages["deaf"]


# -- slices


def group_of(size: int, rank: int) -> SequenceGroup:
    """A place in a group that sends nothing."""
    return SequenceGroup(size, rank, None, None)  # type: ignore[arg-type]


def slices_of(lengths: Sequence[int], size: int, rank: int) -> Slices:
    return Slices.of(torch.cat([torch.arange(n) for n in lengths])[None], group_of(size, rank))


ROWS = {"lengths": st.lists(st.integers(1, 9), min_size=1, max_size=6), "size": st.integers(2, 5)}


@given(**ROWS)
def test_every_token_has_one_rank_and_all_have_as_many(lengths: list[int], size: int) -> None:
    cut = [slices_of(lengths, size, rank) for rank in range(size)]
    tokens = [slices.tokens(CPU) for slices in cut]
    assert sorted(torch.cat([own.mine for own in tokens]).tolist()) == list(range(cut[0].length))
    assert {len(own.mine) for own in tokens} == {cut[0].length // size}
    joined = torch.cat([own.mine for own in tokens])  # what the ranks have, one after the other
    assert torch.equal(joined[tokens[0].order], torch.arange(cut[0].length))
    assert torch.equal(joined, tokens[0].back)


@given(**ROWS)
def test_spans_see_their_sample_up_to_themselves(lengths: list[int], size: int) -> None:
    for rank in range(size):
        slices = slices_of(lengths, size, rank)
        sample = torch.bucketize(torch.arange(slices.length), torch.tensor(slices.bounds[1:]), right=True)
        seen = torch.zeros(slices.length, slices.length, dtype=torch.bool)
        mine = slices.tokens(CPU).mine
        for span in slices.spans:
            queries, keys = mine[slice(*span.queries)], torch.arange(*span.keys)
            for piece in range(len(span.query_bounds) - 1):
                of_query = queries[slice(*span.query_bounds[piece : piece + 2])]
                of_key = keys[slice(*span.key_bounds[piece : piece + 2])]
                assert torch.equal(of_key[len(of_key) - len(of_query) :], of_query)
                seen[of_query[:, None], of_key] = of_key <= of_query[:, None]
        places = torch.arange(slices.length)
        want = (sample[:, None] == sample) & (places <= places[:, None])
        assert torch.equal(seen[mine], want[mine])


def test_readings_of_uneven_ranks_are_put_in_order() -> None:
    owner = torch.tensor([1, 0, 1, 1, 2])
    shares = [Shares(owner, group_of(4, rank)) for rank in range(4)]
    assert [s.mine.tolist() for s in shares] == [[1], [0, 2, 3], [4], []]
    padded = torch.tensor([10, -1, -1, 20, 21, 22, 30, -1, -1, -1, -1, -1])
    assert padded[shares[0].order].tolist() == [20, 10, 21, 22, 30]


# -- attention


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None, scaling: float) -> Tensor:
    """[Q, H, D] of the last queries of one sample, by the definition."""
    heads = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    row = torch.arange(len(k) - len(q), len(k))[:, None]
    column = torch.arange(len(k))
    hidden = (column > row) | (column <= row - (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, **options: Any
) -> Tensor:
    """What the flash-attn package promises of `flash_attn_varlen_func`: a causal mask aligned to the bottom right."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths = [bounds.diff().tolist() for bounds in (cu_seqlens_q, cu_seqlens_k)]
    assert [options["max_seqlen_q"], options["max_seqlen_k"]] == [max(n) for n in lengths]
    left = options.get("window_size", (None, None))[0]
    pieces = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)
    window = None if left is None else left + 1
    return torch.cat([dense(*piece, window, options["softmax_scale"]) for piece in pieces])


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds a flash attention on this machine."""
    mapping: dict[str, bool] = defaultdict(bool, {"window_size": True, "max_seqlen_q": True, "max_seqlen_k": True})

    def options(**asked: Any) -> dict[str, Any]:
        return flash._process_flash_attention_kwargs(**asked, supports_mapping=mapping)

    found = ((None, varlen, None, None, None), (options, None))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *args, **rest: found)
    monkeypatch.setattr(flash, "fa_peft_integration_check", lambda q, k, v, dtype: (q, k, v))


@pytest.mark.parametrize("kernel", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("window", [None, 3, 50])
def test_kernels_attend_as_defined(
    kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch, flash_attention: None
) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", 2)
    lengths = [7, 1, 12, 4]
    row = [torch.randn(24, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2)]
    run = Kernel(0.3, window, None if kernel == "sdpa" else kernel)
    whole = torch.cat([dense(q, k, k, window, 0.3) for q, k in zip(*(t.split(lengths) for t in row), strict=True)])
    for rank in range(3):
        slices = slices_of(lengths, 3, rank)
        mine = slices.tokens(CPU).mine
        for span in slices.spans:
            keys = row[1][slice(*span.keys)]
            got = run(span, row[0][mine[slice(*span.queries)]], keys, keys)
            assert torch.allclose(got, whole[mine[slice(*span.queries)]], atol=1e-6)


class OneRank(SequenceGroup):
    """A group whose ranks all have the same tokens: what one gets is what it would send."""

    def exchange(self, parts: Tensor) -> Tensor:
        SENT.append(tuple(parts.shape))
        return parts

    def all_gather(self, local: Tensor) -> Tensor:
        SENT.append(tuple(local.shape))
        return torch.cat([local] * self.size)


SENT: list[tuple[int, ...]] = []


@pytest.mark.parametrize(
    ("key_heads", "ring_attn_head_stride", "sent"),
    [
        # 8 tokens of this rank, 4 query heads per key head and 2 more for the values' 4 channels
        (4, 1, [(2, 8, 4, 6), (2, 8, 1, 6), (2, 8, 1, 4), (2, 8, 4, 4)] * 2),
        (4, 2, [(2, 8, 8, 6), (2, 8, 2, 6), (2, 8, 2, 4), (2, 8, 8, 4)]),
        (3, 1, [(8, 1, 10)] * 3),
        (3, 2, [(8, 2, 10), (8, 1, 10)]),
        (1, 4, [(8, 1, 10)]),
    ],
)
def test_so_many_key_heads_are_exchanged_at_a_time(
    key_heads: int, ring_attn_head_stride: int, sent: list[tuple[int, ...]]
) -> None:
    how = SequenceParallel(
        group=OneRank(2, 0, None, None),  # type: ignore[arg-type]
        implementation="sdpa",
        head_stride=ring_attn_head_stride,
    )
    slices = Slices.of(torch.arange(16)[None], how.group)
    q, k, v = (torch.randn(1, heads, 8, width) for heads, width in ((4 * key_heads, 6), (key_heads, 6), (key_heads, 4)))
    SENT.clear()
    out = SequenceAttention(slices, how)(torch.nn.Identity(), q, k, v, None, scaling=None)
    assert out.shape == (1, 8, 4 * key_heads, 4)
    assert sent == SENT
    assert by_heads(key_heads, 2) == (key_heads == 4)


# -- refusals


def spec(optim: OptimConfig | None = OptimConfig(), **ds: Any) -> LearnerSpec:  # noqa: B008 (frozen)
    return LearnerSpec(
        role=Role.POLICY, model_path="m", ds=replace(PACKED, **({"ring_attn_size": 2} | ds)), optim=optim
    )


@pytest.mark.parametrize(
    ("ds", "message"),
    [
        ({"packing_samples": False}, r"`ds\.ring_attn_size` 2 and `ds\.packing_samples` False: packed rows are cut"),
        ({"tensor_parallel_size": 2}, r"`ds\.ring_attn_size` 2 and `ds\.tensor_parallel_size` 2: .* shown to work"),
        ({"deepcompile": True}, r"`ds\.deepcompile` True: .* leave `ds\.deepcompile` out"),
        ({"use_liger_kernel": True}, r"`ds\.use_liger_kernel` True"),
        ({"load_in_4bit": True}, r"`ds\.load_in_4bit` True"),
        ({"zpg": 2}, r"`ds\.zpg` 2"),
        ({"ring_attn_size": 1, "ring_attn_head_stride": 2}, r"`ds\.ring_attn_head_stride` 2 .*no rows cut"),
    ],
)
def test_what_does_not_go_together_is_named(ds: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(optim=None, **ds)


def test_a_truncated_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`ds\.ring_attn_size` 2: the tokens that sampling keeps"):
        replace(spec(), truncation=Truncation(top_p=0.9))


def test_models_that_cannot_be_cut_are_named(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "qwen3_next", "qwen3_next")
    found = LearnerSpec(role=Role.REFERENCE, model_path=str(path), ds=replace(PACKED, packing_samples=False))
    assert ruled_out(found, load_module(found, CPU)) == "its linear_attention layers carry a state from token to token"


def test_prompts_are_shared_in_whole_rows_only(tmp_path: Path) -> None:
    found = replace(spec(), model_path=str(save_tiny_model(tmp_path / "qwen3")))
    why = sharing_ruled_out(found, load_module(found, CPU), CPU)
    assert why == "`ds.ring_attn_size` cuts rows over ranks"
