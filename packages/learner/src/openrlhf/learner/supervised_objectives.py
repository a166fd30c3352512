"""Objectives of supervised and preference training: next tokens, reward-model pairs, DPO and its relatives.

Rows 2i and 2i + 1 of a batch of pairs are the chosen and the rejected answer of pair i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.supervised import (
    PairLogprobs,
    RewardModelLossType,
    chosen_nll_loss,
    dpo_loss,
    reward_model_loss,
    sequence_logprobs,
    sft_loss,
)
from openrlhf.learner.objective import ModelOutputs, balance_count, balance_term, distill_count, distill_term

CHOSEN, REJECTED = slice(0, None, 2), slice(1, None, 2)


@dataclass(frozen=True, kw_only=True)
class SftObjective:
    """nll_coef · sft_loss + distill_coef · distill_loss, both per token in `action_mask`.

    sft_loss: the negative log-likelihood. distill_coef: weight of the divergence from a teacher (`Learner.lesson`) at
    these tokens; None: there is none.
    """

    nll_coef: float = 1.0
    distill_coef: float | None = None
    aux_loss_coef: float = 0.0
    with_entropy: bool = False
    rows_per_unit: int = 1

    @property
    def coefficients(self) -> Mapping[str, float]:
        weights = {"sft_loss": self.nll_coef, "distill_loss": self.distill_coef or 0.0}
        return weights | {"aux_loss": self.aux_loss_coef}

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = {"sft_loss": float(batch.action_mask.sum())} | distill_count(batch, self.distill_coef)
        return counts | balance_count(batch, self.aux_loss_coef)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
        assert outputs.logprobs is not None, "supervised fine-tuning needs a language model"
        loss = sft_loss(logprobs=outputs.logprobs, loss_mask=batch.action_mask)
        return {"sft_loss": loss} | distill_term(outputs, batch) | balance_term(outputs)


@dataclass(frozen=True, kw_only=True)
class RewardObjective:
    """The pair loss of a reward model, per pair; `margins` of the batch are used when it has them.

    Besides the metrics of the loss: reward and reward_square, the first two moments of all rewards.
    """

    loss_type: RewardModelLossType = "sigmoid"
    aux_loss_coef: float = 0.0
    with_entropy: bool = False
    rows_per_unit: int = 2

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {"reward_loss": 1.0, "aux_loss": self.aux_loss_coef}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"reward_loss": float(batch.size // 2)} | balance_count(batch, self.aux_loss_coef)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
        assert outputs.rewards is not None, "a reward objective needs a reward model"
        loss = reward_model_loss(
            chosen=outputs.rewards[CHOSEN],
            rejected=outputs.rewards[REJECTED],
            margin=None if batch.margins is None else batch.margins[CHOSEN],
            loss_type=self.loss_type,
        )
        rewards, count = outputs.rewards.detach().double(), float(batch.size)
        moments = {"reward": (rewards.sum(), count), "reward_square": (rewards.square().sum(), count)}
        return {"reward_loss": replace(loss, metrics={**loss.metrics, **moments})} | balance_term(outputs)


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """DPO, cDPO or IPO per pair, plus nll_loss_coef times the likelihood of the chosen answer. Needs `ref_logprobs`."""

    beta: float = 0.1
    ipo: bool = False
    label_smoothing: float = 0.0
    nll_loss_coef: float = 0.0
    aux_loss_coef: float = 0.0
    with_entropy: bool = False
    rows_per_unit: int = 2

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {"preference_loss": 1.0, "nll_loss": self.nll_loss_coef, "aux_loss": self.aux_loss_coef}

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = {"preference_loss": float(batch.size // 2)} | balance_count(batch, self.aux_loss_coef)
        if self.nll_loss_coef > 0:
            counts["nll_loss"] = float(batch.action_mask[CHOSEN].any(-1).sum())
        return counts

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
        assert outputs.logprobs is not None, "preference training needs a language model"
        return self.terms(outputs.logprobs, batch) | balance_term(outputs)

    def terms(self, logprobs: Tensor, batch: Batch) -> dict[str, LossOutput]:
        """The losses of these log-probs [2N, T], for training and evaluation alike."""
        assert batch.ref_logprobs is not None, "preference training needs ref_logprobs"
        policy = sequence_logprobs(logprobs, batch.action_mask)
        reference = sequence_logprobs(batch.ref_logprobs, batch.action_mask)
        pairs = PairLogprobs(
            chosen=policy[CHOSEN],
            rejected=policy[REJECTED],
            ref_chosen=reference[CHOSEN],
            ref_rejected=reference[REJECTED],
        )
        terms = {"preference_loss": dpo_loss(pairs, beta=self.beta, label_smoothing=self.label_smoothing, ipo=self.ipo)}
        if self.nll_loss_coef > 0:
            terms["nll_loss"] = chosen_nll_loss(logprobs=logprobs[CHOSEN], loss_mask=batch.action_mask[CHOSEN])
        return terms
