"""Policy-gradient losses: a surrogate of probability ratios (rows of `tables.POLICY_LOSSES`), KL and entropy terms.

Every loss is a sum over units with their count; nothing is averaged here. Collectives and logging are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from openrlhf.core.config import AdvantageConfig, KLEstimator, PolicyLossConfig
from openrlhf.core.kl import kl_estimate
from openrlhf.core.losses.aggregate import aggregate, effective_agg_mode, loss_count
from openrlhf.core.losses.correction import LOG_RATIO_LIMIT, Correction, correction_weights
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.surrogates import RATIOS, SURROGATES, SurrogateTerms
from openrlhf.core.masks import at_least_fp32, check_rows, masked_sum, select

PolicyLossFunction = Callable[..., LossOutput]
"""What takes the arguments of `policy_loss` by name and keeps its contract; a user's function is checked for that by
`plugins.check_policy_loss`."""

Metrics = dict[str, tuple[Tensor | float, float]]


def policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    rollout_logprobs: Tensor | None = None,
    config: PolicyLossConfig,
    correction: AdvantageConfig | None = None,
    agg_constant: float = 1.0,
) -> LossOutput:
    """Surrogate loss; all tensors [B, T], action_mask bool, gradient to `logprobs` only.

    The row of config.policy_loss_type says which of `RATIOS` makes the log-ratio and which of `SURROGATES` the token
    loss from rho = exp(clamp(log-ratio, -20, 20)).
    With `correction` enabled the token loss is multiplied by `correction_weights` of rollout_logprobs; rejected tokens
    have loss and gradient exactly 0 and stay in the count. Aggregation: config.loss_agg_mode, see `aggregate`.
    Differs from the papers in the clamp of the log-ratio, which bounds the loss of a token with negative advantage.

    Metrics: policy_loss (per unit of the aggregation); per token ppo_clip_ratio (share where the clip binds, rejected
    tokens included) and ppo_kl (mean of old - new, from the raw log-ratio); given rollout_logprobs also vllm_kl (mean
    of rollout - old) and logprobs_diff (mean of its absolute value); with correction is_filter_ratio (rejected share).

    Raises:
        ValueError: shapes that differ, options out of range, correction enabled without rollout_logprobs.
    """
    check_rows(action_mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_rows(action_mask, rollout_logprobs=rollout_logprobs)
    mode = effective_agg_mode(config)
    loss, surrogate = config.loss, SURROGATES[config.loss.surrogate]
    advantages = select(advantages.detach(), action_mask)
    new, old = select(logprobs, action_mask), select(old_logprobs.detach(), action_mask)
    log_ratio = new - old
    raw_log_ratio = log_ratio.detach()
    fix = _correction(old_logprobs, rollout_logprobs, action_mask, config, correction)

    def terms(log_ratio: Tensor) -> SurrogateTerms:
        ratio = RATIOS[loss.ratio](log_ratio, action_mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return SurrogateTerms(ratio=ratio, advantages=advantages, logprobs=new, old_logprobs=old)

    if fix is None:
        token_loss, clipped = surrogate(terms(log_ratio), config)
    else:  # rejected tokens leave the ratio of a sequence, and stay in the share of clipped ones
        token_loss, _ = surrogate(terms(select(log_ratio, fix.keep)), config)
        token_loss = select(token_loss * fix.weights, fix.keep)
        _, clipped = surrogate(terms(raw_log_ratio), config)

    total = aggregate(token_loss, action_mask, mode, agg_constant)
    count = loss_count(action_mask, mode)
    tokens = float(action_mask.sum())
    metrics: Metrics = {
        "policy_loss": (total.detach(), count),
        "ppo_clip_ratio": (masked_sum(clipped.float(), action_mask), tokens),
        "ppo_kl": (-raw_log_ratio.sum(), tokens),
    }
    if rollout_logprobs is not None:
        metrics |= rollout_metrics(old_logprobs, rollout_logprobs, action_mask, tokens)
    if fix is not None:
        metrics["is_filter_ratio"] = ((action_mask & ~fix.keep).sum().float(), tokens)
    return LossOutput(total=total, count=count, metrics=metrics)


def kl_loss(*, logprobs: Tensor, ref_logprobs: Tensor, action_mask: Tensor, estimator: KLEstimator) -> LossOutput:
    """Sum of `kl_estimate` over trainable tokens, to be weighted by the KL coefficient. All tensors [B, T].

    The KL term of GRPO (Shao et al., 2024, eq. 3 and 4, with k3). Differs from it in the mean over all tokens, where
    the paper averages per sequence first, and in the bounds of the estimate. The samples' own dependence on the policy
    has no gradient here, as in the paper; what that leaves of each estimator's gradient is said at `kl_estimate`.
    Gradient to `logprobs` only. Metric: kl. Errors as `kl_estimate`.
    """
    check_rows(action_mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    kl = kl_estimate(select(logprobs, action_mask), select(ref_logprobs.detach(), action_mask), estimator)
    total, count = masked_sum(kl, action_mask), float(action_mask.sum())
    return LossOutput(total=total, count=count, metrics={"kl": (total.detach(), count)})


def entropy_loss(*, entropy: Tensor, action_mask: Tensor) -> LossOutput:
    """Sum of entropy [B, T] (nats) over trainable tokens. The caller SUBTRACTS entropy_coef times its mean.

    The bonus of Mnih et al., "Asynchronous Methods for Deep RL" (2016), section 4; here of the tempered distribution
    that was sampled from. Metric: entropy_loss, the mean entropy per token.
    """
    check_rows(action_mask, entropy=entropy)
    total, count = masked_sum(entropy, action_mask), float(action_mask.sum())
    return LossOutput(total=total, count=count, metrics={"entropy_loss": (total.detach(), count)})


def _correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    action_mask: Tensor,
    config: PolicyLossConfig,
    correction: AdvantageConfig | None,
) -> Correction | None:
    if correction is None or not correction.is_correction_enable:
        return None
    if rollout_logprobs is None:
        raise ValueError("`advantage.is_correction_enable` needs the log-probs of the rollout engine, got None")
    return correction_weights(
        old_logprobs, rollout_logprobs, action_mask, correction, sequence_level=config.loss.per_sequence
    )


def rollout_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, action_mask: Tensor, tokens: float) -> Metrics:
    """How far the engine's log-probs [B, T] are from the trainer's, as (sum, count) over trainable tokens."""
    diff = select(at_least_fp32(rollout_logprobs.detach()) - at_least_fp32(old_logprobs.detach()), action_mask)
    return {"vllm_kl": (diff.sum(), tokens), "logprobs_diff": (diff.abs().sum(), tokens)}
