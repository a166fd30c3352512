"""Weights after AdamW's first step, compared by what the gradients determine (W02)."""

from __future__ import annotations

from torch import Tensor

from openrlhf.learner.config import AdamConfig

GRADIENT_TOLERANCE = 1e-6
"""How far two kernels' sums of one gradient may lie apart (fp32)."""
ROUNDING = 5e-7
"""A few roundings of weights of about 1 in fp32."""


def check_first_step(
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    gradients: dict[str, Tensor],
    *,
    adam: AdamConfig,
    grad_norm: float,
    max_norm: float,
) -> None:
    """Assert that two runs took the same first step.

    The step of a weight is lr x g / (|g| + eps), g being the clipped gradient. It grows with g, so gradients within
    `GRADIENT_TOLERANCE` bound the difference of the steps: nearly nothing where |g| is larger than the tolerance, up to
    two whole steps where the sign of g is not determined (few elements). Without a gradient none may move apart.
    """
    clip, loose, total = min(1.0, max_norm / grad_norm), 0, 0
    assert got.keys() == want.keys()
    for name, expected in want.items():
        g, slack = gradients[name] * clip, GRADIENT_TOLERANCE * clip
        apart = _share_of_rate(g + slack, adam.eps) - _share_of_rate(g - slack, adam.eps)
        excess = (got[name] - expected).abs() - adam.lr * apart.where(gradients[name] != 0, 0.0) - ROUNDING
        assert float(excess.max()) <= 0, f"{name}: {float(excess.max())} more than its gradient leaves open"
        loose, total = loose + int((apart > 0.01).sum()), total + apart.numel()
    assert loose < 0.02 * total, f"{loose} of {total} steps are not determined: this model shows nothing"


def _share_of_rate(gradient: Tensor, eps: float) -> Tensor:
    return gradient / (gradient.abs() + eps)
