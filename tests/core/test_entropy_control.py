"""Clip-Cov: which tokens it draws, that no split matters, what it does to the entropy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.core.config import PolicyLossConfig
from openrlhf.core.entropy_control import clip_cov, token_noise
from openrlhf.core.losses.policy import policy_loss
from support.core_helpers import NAN, gradient, mask, rows

BOUNDS = (1.0, 5.0)


def batch(seed: int, b: int = 16, t: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Advantages and log-probs (NaN off the mask), mask, tokens."""
    g = torch.Generator().manual_seed(seed)
    m = torch.rand(b, t, generator=g) < 0.6
    a, logp = torch.randn(b, t, generator=g), -torch.rand(b, t, generator=g) * 4
    junk = torch.full((b, t), NAN)
    return torch.where(m, a, junk), torch.where(m, logp, junk), m, torch.randint(0, 1000, (b, t), generator=g)


def test_candidates_by_hand() -> None:
    """Means 0 and -2: the parts are (logp + 2) A."""
    a, logp = rows([1.0, 1.0, -1.0, -1.0, 0.0]), rows([-0.5, -3.5, -0.5, -3.5, -2.0])
    m = mask([1, 1, 1, 1, 1])
    everything = torch.zeros(1, 5, dtype=torch.float64)
    assert clip_cov(a, logp, m, share=1.0, bounds=BOUNDS, noise=everything).tolist() == [
        [True, False, False, True, False]
    ]
    assert not clip_cov(a, logp, m, share=1.0, bounds=(1.6, 5.0), noise=everything).any()
    assert not clip_cov(a, logp, m, share=1.0, bounds=(1.0, 1.4), noise=everything).any()
    # One fifth of five tokens is one of two candidates: each with probability one half.
    for level, drawn in ((0.49, 2), (0.51, 0)):
        chosen = clip_cov(a, logp, m, share=0.2, bounds=BOUNDS, noise=torch.full((1, 5), level, dtype=torch.float64))
        assert int(chosen.sum()) == drawn


def test_the_share_is_right_on_average() -> None:
    drawn, tokens = 0, 0
    for seed in range(300):
        a, logp, m, ids = batch(seed)
        noise = token_noise(ids, torch.arange(16) + 16 * seed)
        drawn += int(clip_cov(a, logp, m, share=0.05, bounds=BOUNDS, noise=noise).sum())
        tokens += int(m.sum())
    assert drawn / tokens == pytest.approx(0.05, rel=0.05)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 16), width=st.integers(0, 5))
def test_neither_ranks_nor_order_nor_padding_matter(seed: int, cut: int, width: int) -> None:
    a, logp, m, ids = batch(seed)
    index = torch.arange(16)
    whole = clip_cov(a, logp, m, share=0.1, bounds=BOUNDS, noise=token_noise(ids, index))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    ranks = [order[:cut], order[cut:]]
    padded = [torch.nn.functional.pad(x, (0, width)) for x in (a, logp, m, ids)]
    sums: list[list[Tensor]] = [[], []]

    def on_rank(rank: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        x, y, z, tokens = (part[ranks[rank]] for part in padded)
        noise = token_noise(tokens, index[ranks[rank]])
        return clip_cov(x, y, z, share=0.1, bounds=BOUNDS, noise=noise, reduce=reduce)[:, :12]

    def noted(rank: int, totals: list[Tensor]) -> Callable[[Tensor], Tensor]:
        def reduce(x: Tensor) -> Tensor:
            sums[rank].append(x)
            return totals[len(sums[rank]) - 1] if len(sums[rank]) <= len(totals) else x

        return reduce

    totals: list[Tensor] = []
    for _ in range(2):  # what both ranks sum in their first, then in their second reduction
        sums = [[], []]
        for rank in (0, 1):
            on_rank(rank, noted(rank, totals))
        totals.append(sums[0][len(totals)] + sums[1][len(totals)])
    sums = [[], []]
    for rank in (0, 1):
        assert torch.equal(on_rank(rank, noted(rank, totals)), whole[ranks[rank]])


def test_nothing_comes_from_an_empty_batch() -> None:
    empty = torch.zeros(0, 3)
    assert clip_cov(
        empty, empty, empty.bool(), share=0.1, bounds=BOUNDS, noise=token_noise(empty.long(), torch.zeros(0).long())
    ).shape == (0, 3)
    a, logp, m, ids = batch(0)
    nothing = torch.zeros_like(m)
    assert not clip_cov(a, logp, nothing, share=1.0, bounds=BOUNDS, noise=token_noise(ids, torch.arange(16))).any()


def test_noise_is_uniform_and_of_the_tokens_alone() -> None:
    ids = torch.randint(0, 50_000, (64, 256), generator=torch.Generator().manual_seed(0))
    noise = token_noise(ids, torch.arange(64))
    assert 0 <= float(noise.min()) <= float(noise.max()) < 1
    values = noise.flatten().tolist()
    assert statistics.fmean(values) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(values) == pytest.approx(1 / 12, rel=0.03)
    deciles = torch.histc(noise, 10, 0, 1) / noise.numel()
    assert float((deciles - 0.1).abs().max()) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([noise[:, 1:].flatten(), noise[:, :-1].flatten()]))[0, 1])) < 0.03
    assert not torch.equal(token_noise(ids, torch.arange(64) + 1), noise)  # another sample
    later = ids.clone()
    later[:, 100] += 1
    assert torch.equal(token_noise(later, torch.arange(64))[:, :100], noise[:, :100])


def test_the_entropy_falls_less() -> None:
    """A bandit whose likeliest action is the best: one update with and without the tokens that Clip-Cov leaves out."""
    logits = torch.tensor([2.0, 0.0, -1.0, -2.0], dtype=torch.float64)
    p = logits.softmax(-1)
    counts = (p * 4000).round().long()
    actions = torch.repeat_interleave(torch.arange(4), counts)[:, None]
    reward = torch.tensor([1.0, -1.0, -1.0, -3.0], dtype=torch.float64)[actions]
    advantages = (reward - reward.mean()) / reward.std()
    m = torch.ones_like(actions, dtype=torch.bool)

    def entropy_after(share: float) -> float:
        x = logits.clone().requires_grad_()
        logp = x.log_softmax(-1)[actions]
        noise = token_noise(actions, torch.arange(len(actions)))
        left_out = clip_cov(advantages, logp.detach(), m, share=share, bounds=(1.0, math.inf), noise=noise)
        out = policy_loss(
            logprobs=logp, old_logprobs=logp.detach(), advantages=advantages * ~left_out, action_mask=m,
            config=PolicyLossConfig(),
        )  # fmt: skip
        q = (x - 0.5 * gradient(out.total, x) / out.count).detach().softmax(-1)
        return float(-(q * q.log()).sum())

    before = float(-(p * p.log()).sum())
    falls = [before - entropy_after(share) for share in (0.0, 0.05, 1.0)]
    assert falls[0] > falls[1] > falls[2]
    assert falls[0] > 0.05
