"""Off-policy correction: weights for what training and rollout engine disagree about.

w = p_old / p_rollout per token, detached: both engines should hold the same weights, yet kernels, precision and
staleness differ. Sources: TIS, F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (2025), which clamps from above only; IcePop, Ling team, "Every Step Evolves" (2025). seq-mask-tis joins the
clamp with a mask of sequences by their geometric mean ratio (Liu et al., "When Speed Kills Stability", 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.core.config import AdvantageConfig
from openrlhf.core.masks import at_least_fp32, check_rows, row_mean, select

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this distance from 0 before exp: exp(20) is far outside every clip range."""


@dataclass(frozen=True)
class Correction:
    """weights [B, T], 0 where rejected; keep [B, T] bool, False on rejected trainable tokens and off the mask."""

    weights: Tensor
    keep: Tensor


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    action_mask: Tensor,
    config: AdvantageConfig,
    *,
    sequence_level: bool = False,
) -> Correction:
    """Weights of the token losses, all [B, T], without gradient.

    With log w = old_logprobs - rollout_logprobs and s = exp(mean of log w over the sequence's trainable tokens):
    tis: clamp(w, low, high). icepop: w if low <= w <= high, else 0. seq-mask-tis: 0 for sequences with s outside
    [low, high], else clamp(w, low, high) per token. sequence_level (gspo): the same with s in place of w.
    A ratio that is NaN is outside.

    Raises:
        ValueError: thresholds not 0 <= low <= high, an unknown type, or shapes that differ.
    """
    low, high = config.is_correction_threshold
    if not config.correction_fits:
        raise ValueError(f"`advantage.is_correction_threshold` needs 0 <= low <= high, got {low!r} {high!r}")
    check_rows(action_mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    with torch.no_grad():
        log_w = select(at_least_fp32(old_logprobs) - at_least_fp32(rollout_logprobs), action_mask)
        s = _ratio(row_mean(log_w, action_mask)).unsqueeze(-1).expand_as(log_w)
        w = s if sequence_level else _ratio(log_w)
        match config.is_correction_type:
            case "tis":
                keep = ~w.isnan()
            case "icepop":
                keep = (w >= low) & (w <= high)
            case "seq-mask-tis":
                keep = (s >= low) & (s <= high)
            case unknown:
                raise ValueError(
                    f"`advantage.is_correction_type` {unknown!r} is unknown: choose tis, icepop or seq-mask-tis"
                )
        keep = keep & action_mask
        return Correction(select(w.clamp(low, high), keep), keep)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
