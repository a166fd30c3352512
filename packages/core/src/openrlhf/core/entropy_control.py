"""Clip-Cov: tokens that drive the entropy down most are left out of the policy gradient.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (2025), section 4: the
entropy falls by the covariance of log-probs and advantages, to which few tokens contribute most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.core.advantages import identity
from openrlhf.core.masks import check_rows, select


def clip_cov(
    advantages: Tensor,
    logprobs: Tensor,
    action_mask: Tensor,
    *,
    share: float,
    bounds: tuple[float, float],
    noise: Tensor,
    reduce: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """[B, T] bool: the tokens to be left out. logprobs: of the policy that sampled; noise: `token_noise`.

    A token's part of the covariance is (log p - mean log p) (A - mean A), the means over the trainable tokens of all
    ranks (eq. 10); `reduce` sums a float64 tensor over them and is called twice. Of the tokens whose part lies within
    bounds, `share` times all tokens are drawn, or all where there are fewer.
    Differs from the paper in that parts are those of the rollout batch under the policy that sampled it, known before
    the first forward pass, where the paper takes the present policy: so the choice is the same however the batch is
    split. Each token is drawn on its own, so that their number is right on average.

    Raises:
        ValueError: shapes that differ.
    """
    check_rows(action_mask, advantages=advantages, logprobs=logprobs, noise=noise)
    a, logp = select(advantages.double(), action_mask), select(logprobs.double(), action_mask)
    count, sum_a, sum_logp = reduce(torch.stack([action_mask.sum().double(), a.sum(), logp.sum()])).tolist()
    tokens = max(count, 1.0)
    part = (logp - sum_logp / tokens) * (a - sum_a / tokens)
    low, high = bounds
    candidates = action_mask & (part >= low) & (part <= high)
    (found,) = reduce(candidates.sum().double().reshape(1)).tolist()
    return candidates & (noise < share * count / max(found, 1.0))


def token_noise(tokens: Tensor, index: Tensor) -> Tensor:
    """Uniform in [0, 1), [B, T] float64, of nothing but the sample's number and its tokens up to here.

    So it is the same on whichever rank and in whichever order a sample stands. The mixing is that of SplitMix64 (Steele
    et al., 2014); products of int64 wrap.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    x = (index[:, None] + 1) * -0x61C8864680B583EB + tokens.cumsum(-1) * 0x2545F4914F6CDD1D + place * 0x632BE59BD9B4E019
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ _shifted(x, shift)) * factor
    return _shifted(x, 11).double() / 2**53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, as if unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
