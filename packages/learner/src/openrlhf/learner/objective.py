"""Objectives: which losses, of which outputs, with which coefficients.

An objective knows nothing of micro-batches, ranks or optimisers. The learner sums `counts` over everything that belongs
to the optimiser step first, and divides every total by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.config import AdvantageConfig, KLEstimator, PolicyLossConfig
from openrlhf.core.losses.aggregate import effective_agg_mode, loss_count
from openrlhf.core.losses.distill import distill_loss
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.policy import PolicyLossFunction, entropy_loss, kl_loss, policy_loss, rollout_metrics
from openrlhf.core.losses.value import value_loss


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """What the model says about one micro-batch; [B, T] float32 with gradient, 0 where not action_mask.

    logprobs, entropy: of a language model. divergence: from its teacher. values: of a critic.
    rewards [B]: of a reward model.
    outside: of a truncated distribution 1 where the sampled token had to be added to its set, without gradient.
    aux_loss: scalar mean over this micro-batch's tokens; tokens: how many.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    rewards: Tensor | None = None
    outside: Tensor | None = None
    divergence: Tensor | None = None
    aux_loss: Tensor | None = None
    tokens: float = 0.0


class Objective(Protocol):
    """What `Learner.update` minimises: Σ coefficient · total / count over its terms.

    coefficients: term -> weight. A term without an entry, or with 0, is measured but not trained.
    with_entropy: whether the model has to compute the entropy.
    rows_per_unit: so many rows of a batch belong together (the two answers of a pair) and share a micro-batch.
    """

    @property
    def coefficients(self) -> Mapping[str, float]: ...

    @property
    def with_entropy(self) -> bool: ...

    @property
    def rows_per_unit(self) -> int: ...

    def counts(self, batch: Batch) -> dict[str, float]:
        """Denominator of every term from masks alone; all terms are named, also for a batch of size 0."""
        ...

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
        """Every term of one micro-batch."""
        ...


def _tokens(batch: Batch) -> float:
    return float(batch.action_mask.sum())


def balance_count(batch: Batch, coef: float) -> dict[str, float]:
    """The count of `balance_term`: tokens; nothing where the loss is not trained."""
    return {"aux_loss": float(batch.attention_mask.sum())} if coef > 0 else {}


def distill_count(batch: Batch, coef: float | None) -> dict[str, float]:
    """The count of `distill_term`: tokens; nothing where there is no teacher."""
    return {} if coef is None else {"distill_loss": _tokens(batch)}


def distill_term(outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
    """The divergence from the teacher, where it was measured."""
    if outputs.divergence is None:
        return {}
    return {"distill_loss": distill_loss(divergence=outputs.divergence, action_mask=batch.action_mask)}


def balance_term(outputs: ModelOutputs) -> dict[str, LossOutput]:
    """The balance loss of a mixture of experts. It is no mean over tokens: micro-batches weigh by their tokens."""
    if outputs.aux_loss is None:
        return {}
    return {"aux_loss": LossOutput(total=outputs.aux_loss * outputs.tokens, count=outputs.tokens)}


def with_share(term: LossOutput, name: str, where: Tensor, batch: Batch) -> LossOutput:
    """A term that also measures the share of trainable tokens at which `where` [B, T] is 1."""
    return replace(term, metrics=term.metrics | {name: ((where * batch.action_mask).sum(), _tokens(batch))})


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """policy_loss + kl_coef · kl_loss + distill_coef · distill_loss + aux_coef · aux_loss − entropy_coef · entropy.

    distill_coef: weight of the divergence from a teacher (`Learner.lesson`); None: there is none.
    kl_coef: weight of the KL loss; None leaves the term out (no `ref_logprobs` needed).
    agg_constant: the constant of loss_agg_mode seq-mean-token-sum-norm.
    loss: what computes policy_loss, with its arguments and its contract. What is measured of the engine's log-probs is
    added to the metrics of one that measures nothing.
    detach_old: take the present log-probs as the old ones (`old_logprobs` not needed); right when the batch is the only
    optimiser step of its rollout.
    """

    config: PolicyLossConfig
    correction: AdvantageConfig | None = None
    kl_coef: float | None = None
    kl_estimator: KLEstimator = "k2"
    agg_constant: float = 1.0
    loss: PolicyLossFunction = policy_loss
    detach_old: bool = False
    rows_per_unit: int = 1
    distill_coef: float | None = None

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {
            "policy_loss": 1.0,
            "kl_loss": self.kl_coef or 0.0,
            "distill_loss": self.distill_coef or 0.0,
            "entropy_loss": -(self.config.entropy_coef or 0.0),
            "aux_loss": self.config.aux_loss_coef,
        }

    @property
    def with_entropy(self) -> bool:
        return self.config.entropy_coef is not None

    def counts(self, batch: Batch) -> dict[str, float]:
        counts = {"policy_loss": loss_count(batch.action_mask, effective_agg_mode(self.config))}
        if self.kl_coef is not None:
            counts["kl_loss"] = _tokens(batch)
        if self.with_entropy:
            counts["entropy_loss"] = _tokens(batch)
        return counts | distill_count(batch, self.distill_coef) | balance_count(batch, self.config.aux_loss_coef)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
        assert outputs.logprobs is not None, "a policy objective needs a language model"
        assert batch.advantages is not None, "a policy objective needs advantages"
        old = outputs.logprobs.detach() if self.detach_old else batch.old_logprobs
        assert old is not None, "a policy objective needs old_logprobs"
        terms = {
            "policy_loss": self.loss(
                logprobs=outputs.logprobs,
                old_logprobs=old,
                advantages=batch.advantages,
                action_mask=batch.action_mask,
                rollout_logprobs=batch.rollout_logprobs,
                config=self.config,
                correction=self.correction,
                agg_constant=self.agg_constant,
            )
        }
        if self.loss is not policy_loss and batch.rollout_logprobs is not None:
            apart = rollout_metrics(old, batch.rollout_logprobs, batch.action_mask, _tokens(batch))
            terms["policy_loss"] = replace(terms["policy_loss"], metrics=apart | terms["policy_loss"].metrics)
        if outputs.outside is not None:
            terms["policy_loss"] = with_share(terms["policy_loss"], "outside_kept", outputs.outside, batch)
        if self.kl_coef is not None:
            assert batch.ref_logprobs is not None, "a KL loss needs ref_logprobs"
            terms["kl_loss"] = kl_loss(
                logprobs=outputs.logprobs,
                ref_logprobs=batch.ref_logprobs,
                action_mask=batch.action_mask,
                estimator=self.kl_estimator,
            )
        if outputs.entropy is not None:
            terms["entropy_loss"] = entropy_loss(entropy=outputs.entropy, action_mask=batch.action_mask)
        return terms | distill_term(outputs, batch) | balance_term(outputs)


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """critic_loss + aux_coef · aux_loss: the clipped value loss, and the balance loss of a mixture of experts."""

    value_clip: float | None = 0.5
    aux_coef: float = 0.0
    with_entropy: bool = False
    rows_per_unit: int = 1

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {"critic_loss": 1.0, "aux_loss": self.aux_coef}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"critic_loss": _tokens(batch)} | balance_count(batch, self.aux_coef)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
        assert outputs.values is not None, "a value objective needs a critic"
        assert batch.values is not None, "a value objective needs the values of the rollout"
        assert batch.returns is not None, "a value objective needs returns"
        loss = value_loss(
            values=outputs.values,
            old_values=batch.values,
            returns=batch.returns,
            action_mask=batch.action_mask,
            value_clip=self.value_clip,
        )
        return {"critic_loss": loss} | balance_term(outputs)


def sum_terms(
    terms: Mapping[str, LossOutput], coefficients: Mapping[str, float], counts: Mapping[str, float], world_size: int
) -> Tensor | None:
    """Σ coefficient · total / global count, times world_size because gradients are averaged over so many ranks."""
    loss: Tensor | None = None
    for name, term in terms.items():
        weight = coefficients.get(name, 0.0)
        if weight == 0.0 or counts[name] == 0.0:
            continue
        part = term.total * (weight * world_size / counts[name])
        loss = part if loss is None else loss + part
    return loss
