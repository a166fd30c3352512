"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.core.losses.output import LossOutput
from openrlhf.core.masks import check_rows, masked_sum, select


def value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, action_mask: Tensor, value_clip: float | None
) -> LossOutput:
    """0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), summed over trainable tokens.

    All tensors [B, T], action_mask bool, gradient to `values` only. value_clip c > 0, or None for no clipping.
    Source: the reference code of Schulman et al., PPO (2017); the paper itself (eq. 9) has the unclipped square only.
    Metrics: critic_loss, values, returns, value_clip_ratio (share of tokens whose clipped error is the larger one).

    Raises:
        ValueError: shapes that differ, value_clip not > 0.
    """
    check_rows(action_mask, values=values, old_values=old_values, returns=returns)
    if value_clip is not None and not value_clip > 0:
        raise ValueError(f"`value_clip` must be > 0, got {value_clip!r}")
    values = select(values, action_mask)
    returns = select(returns.detach(), action_mask)
    error = (values - returns).square()
    binds = torch.zeros_like(action_mask)
    if value_clip is not None:
        old_values = select(old_values.detach(), action_mask)
        clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_error = (clipped_values - returns).square()
        binds = (clipped_error > error) & action_mask
        error = torch.maximum(error, clipped_error)
    total, count = 0.5 * masked_sum(error, action_mask), float(action_mask.sum())
    metrics: dict[str, tuple[Tensor | float, float]] = {
        "critic_loss": (total.detach(), count),
        "values": (values.detach().sum(), count),
        "returns": (returns.sum(), count),
        "value_clip_ratio": (binds.sum().float(), count),
    }
    return LossOutput(total=total, count=count, metrics=metrics)
