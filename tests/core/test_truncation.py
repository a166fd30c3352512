"""What truncation keeps of a distribution, and log-probs over that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.core import logprobs
from openrlhf.core.config import Truncation
from openrlhf.core.logprobs import (
    entropy_from_logits,
    kept_from_logits,
    kept_tokens,
    logprobs_from_logits,
    token_logprobs,
)
from openrlhf.core.truncation import KeptTokens, kept_mask

F64 = torch.float64
CUTS = [
    Truncation(top_p=0.9),
    Truncation(top_k=3),
    Truncation(min_p=0.3),
    Truncation(top_p=0.7, top_k=5, min_p=0.05),
]


def drawn(n: int = 6, h: int = 4, v: int = 11, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight and bias in float64, and targets."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(shape, generator=g, dtype=F64) for shape in ((n, h), (v, h), (v,)))
    return hidden, weight, bias, torch.randint(0, v, (n,), generator=g)


def dense(kept: KeptTokens, vocab: int) -> Tensor:
    """bool [N, V]."""
    rows = [torch.zeros(vocab, dtype=torch.bool) for _ in kept.counts]
    for row, part in zip(rows, kept.split([1] * len(rows)), strict=True):
        row[part.ids.long()] = True
        assert int(row.sum()) == len(part.ids)
    return torch.stack(rows)


def by_definition(probabilities: Tensor, cut: Truncation) -> Tensor:
    """The kept tokens of one distribution [V] without equal probabilities: one rule after the other."""
    left = probabilities * (probabilities >= cut.min_p * probabilities.max())
    order = left.argsort(descending=True)
    if cut.top_k > 0:
        left[order[cut.top_k :]] = 0
    left = left / left.sum()
    before = left[order].cumsum(0) - left[order]
    left[order[before >= cut.top_p]] = 0
    return left > 0


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (Truncation(), [1, 1, 1, 1]),
        (Truncation(top_k=2), [1, 1, 0, 0]),
        (Truncation(top_k=9), [1, 1, 1, 1]),
        (Truncation(top_k=0), [1, 1, 1, 1]),
        (Truncation(top_p=0.5), [1, 1, 0, 0]),
        (Truncation(top_p=0.39), [1, 0, 0, 0]),
        (Truncation(top_p=1e-9), [1, 0, 0, 0]),
        (Truncation(min_p=0.5), [1, 1, 0, 0]),
        (Truncation(min_p=1.0), [1, 0, 0, 0]),
        (Truncation(top_p=0.6, top_k=2), [1, 1, 0, 0]),  # top-p of what top-k leaves: 4/7 < 0.6
        (Truncation(top_p=0.55, min_p=0.6), [1, 0, 0, 0]),  # of what min-p leaves: 4/7 >= 0.55
    ],
)
def test_what_is_kept(cut: Truncation, kept: list[int]) -> None:
    z = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_mask(z, cut).tolist() == [list(map(bool, kept))]


def test_equal_logits() -> None:
    z = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert kept_mask(z.clone(), Truncation(top_k=2)).tolist() == [[True, True, True, False]]
    assert int(kept_mask(z.clone(), Truncation(top_p=0.5)).sum()) == 2
    never = torch.tensor([[0.0, float("-inf"), 0.0]])
    for cut in CUTS:
        assert not kept_mask(never.clone(), cut)[0, 1]


@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 5), cut=st.sampled_from(CUTS), v=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_kept_by_definition(seed: int, scale: float, cut: Truncation, v: int) -> None:
    z = scale * torch.randn(3, v, generator=torch.Generator().manual_seed(seed), dtype=F64)
    want = torch.stack([by_definition(row, cut) for row in z.softmax(-1)])
    assert torch.equal(kept_mask(z.clone(), cut), want)
    assert torch.equal(want.any(-1), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_sampled_token_outside_is_added_and_told(cut: Truncation) -> None:
    hidden, weight, bias, _ = drawn()
    z = hidden @ weight.T + bias
    least = z.argmin(-1)
    kept, outside = kept_tokens(hidden, weight, least, cut, bias=bias)
    assert outside.all()
    want = kept_mask(z.clone(), cut).scatter(1, least[:, None], True)
    assert torch.equal(dense(kept, 11), want)
    assert torch.equal(dense(kept_from_logits(z, least, cut)[0], 11), want)
    assert not kept_tokens(hidden, weight, z.argmax(-1), cut, bias=bias)[1].any()
    logp, _ = token_logprobs(hidden, weight, least, bias=bias, kept=kept)
    assert torch.isfinite(logp).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_logprobs_are_those_of_the_kept_set(cut: Truncation, temperature: float) -> None:
    """Values and gradients by hand: 1[k = y] - p_k on the set, 0 elsewhere; entropy -p_k (log p_k + H)."""
    hidden, weight, bias, targets = (t.requires_grad_() if t.is_floating_point() else t for t in drawn())
    kept, _ = kept_tokens(hidden, weight, targets, cut, temperature, bias)
    logp, entropy = token_logprobs(hidden, weight, targets, temperature, bias, True, 4, 3, kept=kept)
    z = (hidden @ weight.T + bias).detach()
    p = torch.where(dense(kept, 11), (z / temperature).exp(), 0.0)
    p /= p.sum(-1, keepdim=True)
    log_p = torch.where(p > 0, p.log(), 0.0)
    h = -(p * log_p).sum(-1)
    assert entropy is not None
    assert float((logp.detach() - log_p.gather(1, targets[:, None])[:, 0]).abs().max()) <= 1e-12
    assert float((entropy.detach() - h).abs().max()) <= 1e-12
    one = torch.nn.functional.one_hot(targets, 11)
    by_hand = ((one - p) + 0.3 * -p * (log_p + h[:, None])) / temperature
    got = torch.autograd.grad((logp + 0.3 * entropy).sum(), [hidden, weight, bias])
    want = (by_hand @ weight.detach(), by_hand.T @ hidden.detach(), by_hand.sum(0))
    assert max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) <= 1e-12
    given_logits = z.clone().requires_grad_()
    again = logprobs_from_logits(given_logits, targets, temperature, kept)
    again_h = entropy_from_logits(given_logits, temperature, kept)
    assert float((again - logp).detach().abs().max()) <= 1e-12
    gradient = torch.autograd.grad((again + 0.3 * again_h).sum(), given_logits)[0]
    assert float((gradient - by_hand).abs().max()) <= 1e-12


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_gradcheck(cut: Truncation) -> None:
    hidden, weight, bias, targets = drawn(n=4)
    kept, _ = kept_tokens(hidden, weight, targets, cut, 0.8, bias)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        logp, entropy = token_logprobs(tensors[0], tensors[1], targets, 0.8, tensors[2], True, 3, 4, kept=kept)
        assert entropy is not None
        return logp, entropy

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in (hidden, weight, bias)])


def test_splits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets = drawn(n=13)
    cut = CUTS[3]
    whole, outside = kept_tokens(hidden, weight, targets, cut, 1.0, bias)
    monkeypatch.setattr(logprobs, "_CPU_TILE", (5, 7))  # three rows at a time
    parts, outside_parts = kept_tokens(hidden, weight, targets, cut, 1.0, bias)
    assert torch.equal(parts.counts, whole.counts)
    assert torch.equal(parts.ids, whole.ids)
    assert torch.equal(outside_parts, outside)
    want, _ = token_logprobs(hidden, weight, targets, bias=bias, kept=whole)
    pieces = whole.split([4, 0, 9])
    got = [
        token_logprobs(h, weight, t, bias=bias, kept=k, chunk_tokens=2, chunk_vocab=4)[0]
        for h, t, k in zip(hidden.split([4, 0, 9]), targets.split([4, 0, 9]), pieces, strict=True)
    ]
    assert float((torch.cat(got) - want).abs().max()) <= 1e-12
    joined = KeptTokens.joined(pieces)
    assert torch.equal(joined.ids, whole.ids)
    assert torch.equal(joined.counts, whole.counts)


def test_a_count_of_0_stands_for_all_tokens() -> None:
    hidden, weight, bias, targets = drawn()
    some, _ = kept_tokens(hidden[:2], weight, targets[:2], Truncation(top_k=2), bias=bias)
    mixed = KeptTokens.joined([some, KeptTokens.whole(4)])
    got, _ = token_logprobs(hidden, weight, targets, bias=bias, kept=mixed, chunk_vocab=4)
    full, _ = token_logprobs(hidden, weight, targets, bias=bias)
    assert torch.allclose(got[2:], full[2:], rtol=0, atol=1e-12)
    assert (got[:2] > full[:2]).all()
    assert len(KeptTokens.joined([]).ids) == 0


@pytest.mark.parametrize("wrong", [{"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}])
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be in"):
        Truncation(**wrong)
