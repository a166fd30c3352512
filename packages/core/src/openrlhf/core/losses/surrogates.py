"""What rows of `tables.POLICY_LOSSES` are made of: log-ratios, and surrogates that make token losses of ratios.

A new loss is a function here and a row there. Tensors are [B, T] in at least float32; advantages, log-probs and
log-ratios are 0 off the action mask. What is held back from the gradient is `detach`ed here, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.core.config import PolicyLossConfig
from openrlhf.core.losses.correction import LOG_RATIO_LIMIT
from openrlhf.core.masks import row_mean, select
from openrlhf.core.tables import Ratio, Surrogate


@dataclass(frozen=True, kw_only=True)
class SurrogateTerms:
    """What a surrogate is made of, [B, T].

    ratio: of new to old probability, in the form that the loss's row names. advantages, old_logprobs: without gradient.
    logprobs, old_logprobs: of the tokens, for surrogates that need more than their ratio.
    """

    ratio: Tensor
    advantages: Tensor
    logprobs: Tensor
    old_logprobs: Tensor

    @property
    def probability(self) -> Tensor:
        """Of the token before the update: what DPPO and DRPO call mu."""
        return self.old_logprobs.clamp(max=0.0).exp()

    @property
    def moves_on(self) -> Tensor:
        """Where the policy gradient would move the ratio further away from 1 than it is, bool."""
        return self.advantages * (self.ratio.detach() - 1) > 0


def _sequence_ratio(log_ratio: Tensor, action_mask: Tensor) -> Tensor:
    """The mean log-ratio over a sequence's trainable tokens, on all of them (Zheng et al., GSPO, 2025, eq. 7)."""
    return row_mean(log_ratio, action_mask).unsqueeze(-1).expand_as(log_ratio)


def _sequence_token_ratio(log_ratio: Tensor, action_mask: Tensor) -> Tensor:
    """In value the sequence's mean log-ratio, in gradient the token's own (Zheng et al., GSPO, 2025, eq. 14)."""
    own = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return _sequence_ratio(log_ratio.detach(), action_mask) + (own - own.detach())


def _sequence_product(log_ratio: Tensor, action_mask: Tensor) -> Tensor:
    """The log-ratio of the whole sequence, on all of its tokens: no length normalisation (Shen et al., VESPO, 2026)."""
    return select(log_ratio, action_mask).sum(-1, keepdim=True).expand_as(log_ratio)


def _clip(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), and where the clip decides it.

    Schulman et al., PPO, 2017, eq. 7; own high: Yu et al., DAPO, 2025, section 3.1. With dual_clip c > 1, where A < 0:
    -max(that minimum, c A) (Ye et al., "Mastering Complex Control in MOBA Games", 2020).
    """
    ratio, advantages = terms.ratio, terms.advantages
    low, high = config.clip
    if not config.clip_fits:
        raise ValueError(f"`eps_clip_low_high` / `eps_clip` need 0 <= low <= 1 and high >= 0, got {low!r} {high!r}")
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    objective = torch.minimum(unclipped, clipped)
    if config.dual_clip is not None:
        if not config.dual_clip > 1:
            raise ValueError(f"`dual_clip` must be > 1, got {config.dual_clip!r}")
        bounded = torch.maximum(objective, config.dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective, clipped.detach() < unclipped.detach()


def _weight(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """-min(rho, m) A log p, the weight without gradient; clipped where m decides it.

    CISPO (Chen et al., MiniMax-M1, 2025, eq. 4 and 5) without a lower bound, as its authors ran it; m = 5: Khatri et
    al., "The Art of Scaling Reinforcement Learning Compute for LLMs" (2025), section 3.2.
    """
    _positive("`cispo_max_ratio`", config.cispo_max_ratio)
    ratio = terms.ratio.detach()
    weight = ratio.clamp(max=config.cispo_max_ratio)
    return -weight * terms.advantages * terms.logprobs, ratio > weight


def _soft(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, with a tau of its own where A > 0; nothing is clipped.

    SAPO (Gao et al., 2025). Its gradient is that of -rho A at rho = 1 and fades on both sides.
    """
    _positive("`sapo_tau`", *config.sapo_tau)
    positive, negative = (torch.full_like(terms.advantages, tau) for tau in config.sapo_tau)
    tau = torch.where(terms.advantages > 0, positive, negative)
    gate = (4 / tau) * torch.sigmoid(tau * (terms.ratio - 1))
    return -gate * terms.advantages, torch.zeros_like(terms.ratio, dtype=torch.bool)


def _mask_tv(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """-rho A, and 0 where |p - mu| > delta and the gradient would move p on, the total variation between (p, 1 - p)
    and (mu, 1 - mu): DPPO-Binary-TV (Qi et al., 2026, eq. 11 to 13)."""
    _positive("`dppo_tv_delta`", config.dppo_tv_delta)
    p = terms.logprobs.detach().clamp(max=0.0).exp()
    return _masked(terms, (p - terms.probability).abs(), config.dppo_tv_delta)


def _mask_kl(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """As `_mask_tv` by mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)): DPPO-Binary-KL (Qi et al., 2026, eq. 14)."""
    _positive("`dppo_kl_delta`", config.dppo_kl_delta)
    new, old = (x.detach().clamp(max=0.0) for x in (terms.logprobs, terms.old_logprobs))
    tiny = torch.finfo(new.dtype).tiny
    other_new, other_old = (-torch.expm1(x) for x in (new, old))  # exact where a token is nearly certain
    others = other_old * (other_old.clamp_min(tiny).log() - other_new.clamp_min(tiny).log())
    return _masked(terms, old.exp() * (old - new) + others, config.dppo_kl_delta)


def _masked(terms: SurrogateTerms, divergence: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """-rho A but where the divergence is above delta and grows.

    Differs from the paper in what the divergence is from: the trainer's own probability before the update, where the
    paper takes the engine's. What the two disagree about is for the off-policy correction.
    """
    masked = terms.moves_on & (divergence > delta)
    return select(-terms.ratio * terms.advantages, ~masked), masked


def _quadratic(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """-rho A + |A| mu (rho - 1)^2 / (2 delta), and where its gradient has turned round.

    DRPO (Yao et al., 2026, eq. 8): the gradient is that of -rho A times 1 - sign(A (rho - 1)) |p - mu| / delta.
    """
    _positive("`drpo_delta`", config.drpo_delta)
    mu, moved = terms.probability, terms.ratio - 1
    penalty = terms.advantages.abs() * mu * moved.square() / (2 * config.drpo_delta)
    turned = terms.moves_on & (mu * moved.detach().abs() > config.drpo_delta)
    return -terms.ratio * terms.advantages + penalty, turned


def _gamma(terms: SurrogateTerms, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """-W^k exp(lambda (1 - W)) A log p, the weight without gradient, W the sequence's ratio; nothing is clipped.

    VESPO (Shen et al., 2026): k and lambda are others where A < 0. With A that differ within a sequence, as after a
    KL penalty, each token takes those of its own sign.
    """
    _positive("`vespo_k` and `vespo_lambda`", *config.vespo_k, *config.vespo_lambda)
    ratio = terms.ratio.detach()
    negative = terms.advantages < 0
    k, rate = (
        torch.where(negative, ratio.new_tensor(b), ratio.new_tensor(a))
        for a, b in (config.vespo_k, config.vespo_lambda)
    )
    weight = (k * ratio.log() + rate * (1 - ratio)).exp()
    return -weight * terms.advantages * terms.logprobs, torch.zeros_like(ratio, dtype=torch.bool)


def _positive(name: str, *values: float) -> None:
    if not all(value > 0 for value in values):
        raise ValueError(f"{name} must be > 0, got {' '.join(map(repr, values))}")


RATIOS: dict[Ratio, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, action_mask: log_ratio,
    "sequence": _sequence_ratio,
    "sequence_token": _sequence_token_ratio,
    "sequence_product": _sequence_product,
}
"""(log-ratios of tokens, action mask) -> log-ratios that the loss is about; all [B, T]."""

SURROGATES: dict[Surrogate, Callable[[SurrogateTerms, PolicyLossConfig], tuple[Tensor, Tensor]]] = {
    "clip": _clip,
    "weight": _weight,
    "soft": _soft,
    "mask_tv": _mask_tv,
    "mask_kl": _mask_kl,
    "quadratic": _quadratic,
    "gamma": _gamma,
}
"""Token loss [B, T], and [B, T] bool: where a bound of the loss decided it (the metric ppo_clip_ratio)."""
