"""From token losses to one number: sum and count of the units that a loss averages over.

Count depends on the mask only. The mean of an optimiser step is sum(totals) / sum(counts) over all its micro-batches
and ranks, so it does not depend on how the samples are split.
"""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from openrlhf.core.config import PolicyLossConfig
from openrlhf.core.masks import check_rows, masked_sum, row_mean
from openrlhf.core.tables import LossAggMode


def effective_agg_mode(config: PolicyLossConfig) -> LossAggMode:
    """The aggregation of the policy loss: that of its row, else the configured one.

    Raises:
        ValueError: another aggregation was chosen than the one that belongs to the loss.
    """
    if config.agg_mode_conflicts:
        raise ValueError(
            f"`policy_loss_type` {config.policy_loss_type!r} is aggregated by {config.loss.agg_mode!r} and "
            f"excludes `loss_agg_mode` {config.loss_agg_mode!r}: leave `loss_agg_mode` out"
        )
    return config.loss.agg_mode or config.loss_agg_mode


def loss_count(action_mask: Tensor, agg_mode: LossAggMode) -> float:
    """How many units action_mask [B, T] holds: tokens (token-mean), else sequences with a trainable token."""
    check_rows(action_mask)
    units = action_mask if agg_mode == "token-mean" else action_mask.any(-1)
    return float(units.sum())


def aggregate(token_loss: Tensor, action_mask: Tensor, agg_mode: LossAggMode, agg_constant: float = 1.0) -> Tensor:
    """Sum of token_loss [B, T] over units, a scalar; to be divided by the step's sum of `loss_count`.

    token-mean: sum over trainable tokens. seq-mean-token-mean: sum over sequences of their mean over tokens.
    seq-mean-token-sum-norm: sum over sequences of their sum over tokens / agg_constant, a length in tokens that is
    the same for all sequences (Liu et al., "Understanding R1-Zero-Like Training", 2025).
    Sequences without a trainable token contribute 0.

    Raises:
        ValueError: agg_constant not > 0 where it is used.
    """
    check_rows(action_mask, token_loss=token_loss)
    match agg_mode:
        case "token-mean":
            return masked_sum(token_loss, action_mask)
        case "seq-mean-token-mean":
            return row_mean(token_loss, action_mask).sum()
        case "seq-mean-token-sum-norm":
            if not agg_constant > 0:
                raise ValueError(f"agg_constant must be a length > 0, got {agg_constant!r}")
            return masked_sum(token_loss, action_mask) / agg_constant
        case _:
            assert_never(agg_mode)
