"""Losses without sampling: the likelihood of target tokens, and on pairs of answers DPO and reward-model losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from openrlhf.core.losses.output import LossOutput
from openrlhf.core.masks import at_least_fp32, check_rows, check_vectors, masked_sum, row_mean

RewardModelLossType = Literal["sigmoid", "logexp"]


def sft_loss(*, logprobs: Tensor, loss_mask: Tensor) -> LossOutput:
    """Sum of -logprobs over loss_mask (assistant tokens), counted in tokens. Both [B, T], loss_mask bool.

    Metric: gpt_loss, the mean negative log-likelihood per token.
    """
    check_rows(loss_mask, logprobs=logprobs)
    total, count = -masked_sum(logprobs, loss_mask), float(loss_mask.sum())
    return LossOutput(total=total, count=count, metrics={"gpt_loss": (total.detach(), count)})


@dataclass(frozen=True, kw_only=True)
class PairLogprobs:
    """Log-probabilities of the answers of B pairs, each [B]: sums over an answer's tokens (`sequence_logprobs`)."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor

    def __post_init__(self) -> None:
        check_vectors(
            chosen=self.chosen, rejected=self.rejected, ref_chosen=self.ref_chosen, ref_rejected=self.ref_rejected
        )


def sequence_logprobs(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Sum of logprobs [B, T] over the masked tokens of each row, [B] in at least float32."""
    check_rows(loss_mask, logprobs=logprobs)
    return torch.where(loss_mask, at_least_fp32(logprobs), 0.0).sum(-1)


def dpo_loss(
    pairs: PairLogprobs, *, beta: float, label_smoothing: float = 0.0, ipo: bool = False, valid: Tensor | None = None
) -> LossOutput:
    """Sum over pairs, gradient to chosen and rejected only; valid [B] bool leaves out padding pairs.

    With z = (chosen - rejected) - (ref_chosen - ref_rejected):
    DPO: -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z), e = label_smoothing (Rafailov et al., 2023, eq. 7;
    smoothed: cDPO, E. Mitchell, 2023). IPO: (z - 1 / (2 beta))^2 on summed log-probs (Azar et al., 2023, eq. 17).

    Metrics per pair: loss, acc (implicit reward of chosen above that of rejected), chosen_reward and reject_reward
    (beta times the log-ratio to the reference).

    Raises:
        ValueError: beta not > 0, label_smoothing outside [0, 0.5], or given together with ipo.
    """
    if not beta > 0:
        raise ValueError(f"`beta` must be > 0, got {beta!r}")
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(f"`label_smoothing` must lie in [0, 0.5], got {label_smoothing!r}")
    if ipo and label_smoothing:
        raise ValueError(f"`ipo` has no label smoothing: leave out `label_smoothing` {label_smoothing!r}")
    chosen = at_least_fp32(pairs.chosen) - at_least_fp32(pairs.ref_chosen.detach())
    rejected = at_least_fp32(pairs.rejected) - at_least_fp32(pairs.ref_rejected.detach())
    z = chosen - rejected
    if ipo:
        loss = (z - 1 / (2 * beta)).square()
    else:
        loss = -(1 - label_smoothing) * logsigmoid(beta * z) - label_smoothing * logsigmoid(-beta * z)
    return _pair_output(loss, beta * chosen.detach(), beta * rejected.detach(), valid)


def chosen_nll_loss(*, logprobs: Tensor, loss_mask: Tensor) -> LossOutput:
    """Sum over chosen answers of their mean negative log-likelihood per token; logprobs, loss_mask [B, T].

    To be weighted by --model.nll_loss_coef (Pang et al., "Iterative Reasoning Preference Optimization", 2024, eq. 2).
    Answers without tokens are not counted. Metric: nll_loss.
    """
    check_rows(loss_mask, logprobs=logprobs)
    total, count = -row_mean(logprobs, loss_mask).sum(), float(loss_mask.any(-1).sum())
    return LossOutput(total=total, count=count, metrics={"nll_loss": (total.detach(), count)})


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
    return _pair_output(softplus(-difference), chosen.detach(), rejected.detach(), valid)


def _pair_output(loss: Tensor, chosen_reward: Tensor, reject_reward: Tensor, valid: Tensor | None) -> LossOutput:
    """Sum a loss [B] over the valid pairs, with the metrics that all pair losses share. Rewards [B], detached."""
    check_vectors(loss=loss, chosen_reward=chosen_reward, reject_reward=reject_reward, valid=valid)
    mask = torch.ones_like(loss, dtype=torch.bool) if valid is None else valid.bool()
    total, count = masked_sum(loss, mask), float(mask.sum())
    metrics: dict[str, tuple[Tensor | float, float]] = {
        "loss": (total.detach(), count),
        "acc": (masked_sum((chosen_reward > reject_reward).float(), mask), count),
        "chosen_reward": (masked_sum(chosen_reward, mask), count),
        "reject_reward": (masked_sum(reject_reward, mask), count),
    }
    return LossOutput(total=total, count=count, metrics=metrics)
