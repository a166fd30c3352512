"""Per-token estimates of KL(policy || reference), and the controller of their coefficient.

Estimators: J. Schulman, "Approximating KL divergence" (2020). Adaptive controller: Ziegler et al., "Fine-Tuning
Language Models from Human Preferences" (2019), section 2.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openrlhf.core.config import KLConfig, KLEstimator
from openrlhf.core.masks import at_least_fp32

KL_LIMIT = 10.0
"""Estimates are clamped to [-KL_LIMIT, KL_LIMIT]; the gradient is 0 where the clamp binds."""

_K2_INPUT_LIMIT = math.sqrt(2 * KL_LIMIT)
# k3 exceeds KL_LIMIT from a log-ratio of -2.62 down and of 11 up: at 20 its value is clamped, and exp stays finite.
_K3_INPUT_LIMIT = 20.0

# One update may not shrink the coefficient below this share: with n_samples > 5 * horizon it would become negative.
_MIN_FACTOR = 0.1
_MAX_RELATIVE_ERROR = 0.2


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL estimate per token from samples of the policy. All tensors [...] alike; computed in float32 (or float64).

    With d = logprobs - ref_logprobs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, never negative.
    The result is clamped to [-10, 10]. The input of k2 and k3 is clamped where the result is at its bound anyway,
    so that values and gradients stay finite for any log-ratio (the paper has neither clamp).

    As a reward penalty k1 is unbiased. As a loss, k1 has zero expected gradient, k2 has that of
    KL(policy || reference) and k3 that of KL(reference || policy).

    Raises:
        ValueError: unknown estimator, or shapes that differ.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} differ")
    d = at_least_fp32(logprobs) - at_least_fp32(ref_logprobs)
    if estimator == "k1":
        return d.clamp(-KL_LIMIT, KL_LIMIT)
    if estimator == "k2":
        return (d.clamp(-_K2_INPUT_LIMIT, _K2_INPUT_LIMIT).square() / 2).clamp_max(KL_LIMIT)
    if estimator == "k3":
        d = d.clamp(-_K3_INPUT_LIMIT, _K3_INPUT_LIMIT)
        return (torch.expm1(-d) + d).clamp(0.0, KL_LIMIT)
    raise ValueError(f"`kl.estimator` {estimator!r} is unknown: choose k1, k2 or k3")


class KLController:
    """The KL coefficient `value`: constant, or with a target under proportional control in log space.

    Then an update does value *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_samples / horizon. Differs from the paper in
    that one update shrinks the coefficient by 90 % at most (the paper's would turn negative when n_samples exceeds five
    horizons), and in that the KL is the mean per token, not per sample. Its state belongs into checkpoints.

    Raises:
        ValueError: the coefficient < 0, target or horizon not > 0.
    """

    def __init__(self, config: KLConfig) -> None:
        if config.init_coef < 0:
            raise ValueError(f"`kl.init_coef` must be >= 0, got {config.init_coef!r}")
        for name, number in (("target", config.target), ("horizon", config.horizon)):
            if config.target is not None and number is not None and number <= 0:
                raise ValueError(f"`kl.{name}` must be > 0, got {number!r}")
        self.value = config.init_coef
        self.target = config.target
        self.horizon = config.horizon

    def update(self, kl: float, n_samples: int) -> None:
        """Move the coefficient up if kl (mean per token over the last n_samples samples) exceeds the target, else down.

        A KL that is not finite changes nothing.
        """
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self.value *= max(1.0 + error * n_samples / self.horizon, _MIN_FACTOR)

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, exact in JSON."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.value = float(state["value"])
