"""Small builders for the tests of openrlhf.core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.losses.output import LossOutput

NAN = float("nan")
INF = float("inf")


def rows(*values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """[B, T]"""
    return torch.tensor(values, dtype=dtype)


def mask(*values: Sequence[int]) -> Tensor:
    """[B, T] bool"""
    return torch.tensor(values, dtype=torch.bool)


def mean(output: LossOutput) -> float:
    """The mean of a loss over its units; 0 for none."""
    return float(output.total.detach()) / output.count if output.count else 0.0


def step_mean(outputs: Sequence[LossOutput]) -> Tensor:
    """The loss of an optimiser step made of these micro-batches."""
    return torch.stack([o.total for o in outputs]).sum() / max(sum(o.count for o in outputs), 1.0)


def metric_means(output: LossOutput) -> Mapping[str, float]:
    return {name: float(total) / count if count else 0.0 for name, (total, count) in output.metrics.items()}


def gradient(total: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(total, x)
    return grad


def check(actual: Tensor, expected: Sequence[object] | Tensor, tol: float = 1e-6) -> None:
    """Assert equal shapes and values within tol, absolute; NaN equals nothing. (assert_close imports the compiler.)"""
    have, want = actual.detach().double(), torch.as_tensor(expected, dtype=torch.float64)
    assert have.shape == want.shape
    assert ((have - want).abs() <= tol).all(), f"{have} is not {want}"


@dataclass
class AdamState:
    lr: float
    step: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0


def adam_step(x: Tensor, grad: Tensor, state: AdamState) -> Tensor:
    """Adam by hand: torch.optim imports the compiler, which takes seconds."""
    state.step += 1
    state.first = 0.9 * state.first + 0.1 * grad
    state.second = 0.95 * state.second + 0.05 * grad.square()
    first = state.first / (1 - 0.9**state.step)
    second = state.second / (1 - 0.95**state.step)
    return (x - state.lr * first / (second.sqrt() + 1e-12)).detach().requires_grad_()


def random_inputs(seed: int, b: int = 6, t: int = 7) -> dict[str, Any]:
    """Arguments of policy_loss: [B, T], row 1 without a trainable token."""
    g = torch.Generator().manual_seed(seed)
    m = torch.rand(b, t, generator=g) < 0.6
    m[:, 0] = False
    m[1] = False
    logp = torch.randn(b, t, generator=g) * 0.3 - 1
    return {
        "logprobs": logp,
        "old_logprobs": logp + 0.3 * torch.randn(b, t, generator=g),
        "rollout_logprobs": logp + 0.5 * torch.randn(b, t, generator=g),
        "advantages": torch.randn(b, t, generator=g),
        "action_mask": m,
    }
