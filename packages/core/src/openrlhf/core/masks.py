"""Masked sums and the shape checks that broadcasting would hide.

Masked entries are selected away, never multiplied by zero: a NaN or an infinity under the mask reaches neither
value nor gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """x in float32, or unchanged if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x in at least float32 where mask, else exactly 0 with zero gradient. Both [B, T]."""
    x = at_least_fp32(x)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over mask, a scalar (0 with a zero gradient if the mask is empty)."""
    return select(x, mask).sum()


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x [B, T] over each row's masked entries, [B]; 0 for a row without any."""
    return select(x, mask).sum(-1) / mask.sum(-1).clamp_min(1)


def check_rows(action_mask: Tensor, **tensors: Tensor | None) -> None:
    """Every given tensor must be [B, T] like action_mask, which must be bool.

    Raises:
        ValueError: names the tensor, its shape and the shape it should have.
    """
    if action_mask.dtype != torch.bool or action_mask.ndim != 2:
        raise ValueError(
            f"action_mask must be a bool [B, T] tensor, got {action_mask.dtype} {tuple(action_mask.shape)}"
        )
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != action_mask.shape:
            raise ValueError(
                f"{name} must be [B, T] = {tuple(action_mask.shape)} like action_mask, got {tuple(tensor.shape)}"
            )


def check_vectors(**tensors: Tensor | None) -> None:
    """Every given tensor must be a vector [N], all of the same length.

    Raises:
        ValueError: lists every name with its shape.
    """
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"these must be vectors of one length: {shapes}")
