"""Losses of a scalar reward model on preference pairs."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import softplus

from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.preference import pair_output
from openrlhf.core.masks import check_vectors

RewardModelLossType = Literal["sigmoid", "logexp"]


def reward_model_loss(
    *,
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    loss_type: RewardModelLossType = "sigmoid",
    valid: Tensor | None = None,
) -> LossOutput:
    """Sum over pairs of the loss on the scores chosen, rejected [B]; valid [B] bool leaves out padding pairs.

    sigmoid: -log sigmoid(chosen - rejected - margin), Bradley-Terry with the margin [B] of Llama 2 (Touvron et al.,
    2023, eq. 2), 0 if None. logexp: log(1 + exp(rejected - chosen)), computed without overflow and without margin.
    In the dtype of the scores: cast them to float32 first for --model.compute_fp32_loss_enable.

    Metrics per pair: loss, acc, chosen_reward, reject_reward (the scores).

    Raises:
        ValueError: shapes that differ, an unknown loss_type, a margin with logexp.
    """
    check_vectors(chosen=chosen, rejected=rejected, margin=margin, valid=valid)
    if loss_type not in ("sigmoid", "logexp"):
        raise ValueError(f"`loss_type` {loss_type!r} is unknown: choose sigmoid or logexp")
    if margin is not None and loss_type == "logexp":
        raise ValueError("`margin` needs `loss_type` 'sigmoid', got 'logexp'")
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin.to(difference.dtype)
    return pair_output(softplus(-difference), chosen.detach(), rejected.detach(), valid)
