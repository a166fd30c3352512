"""What can go wrong with a weight push without an error: each fault takes the tensors of a push and spoils them.

Sizes are those of real accidents: a forgotten factor, a bucket that did not arrive, a name that went to another layer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from openrlhf.rollout.sync_check import Tolerance, mean_difference, rms_difference


def share_of(tolerance: Tolerance, trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]) -> float:
    """How far the sides differ, in units of what the tolerance allows."""
    share = mean_difference(trainer, engine) / tolerance.value
    return share if tolerance.rms is None else max(share, rms_difference(trainer, engine) / tolerance.rms)


Weights = Mapping[str, Tensor]
Fault = Callable[[dict[str, Tensor], Sequence[Weights], random.Random], str]
"""Spoils the weights in place; gets the weights of earlier pushes, newest first. Returns what it did."""

STEPS_MISSED = 8


def matrices(weights: Weights) -> list[str]:
    """Names of the two-dimensional tensors."""
    return [name for name, tensor in weights.items() if tensor.dim() == 2]


def unnormalised(weights: Weights) -> list[str]:
    """Those of which no norm undoes a factor, as Qwen3 has it behind queries and keys."""
    return [name for name in matrices(weights) if name.replace("_proj.", "_norm.") not in weights]


def zeroed(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """A tensor that was allocated and never written."""
    name = rng.choice(list(weights))
    weights[name] = torch.zeros_like(weights[name])
    return name


def scaled(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """A factor that one side does not apply, as alpha / rank of an adapter or the 1 that Gemma adds to its norms."""
    name, factor = rng.choice(unnormalised(weights)), rng.choice([0.5, 2.0])
    weights[name] = weights[name] * factor
    return f"{name} x {factor}"


def swapped(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """Two matrices of one shape exchanged: another layer, keys and values, gate and up."""
    names = matrices(weights)
    a, b = rng.choice([(a, b) for a in names for b in names if a < b and weights[a].shape == weights[b].shape])
    weights[a], weights[b] = weights[b], weights[a]
    return f"{a} and {b}"


def transposed(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """Read in the other order."""
    name = rng.choice(matrices(weights))
    weights[name] = weights[name].t().contiguous().view(weights[name].shape)
    return name


def truncated(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """Half of the rows of a layer, the share of one of two tensor-parallel ranks, is missing."""
    name = rng.choice(matrices(weights))
    layer = name[: name.index(".", len("model.layers.")) + 1] if name.startswith("model.layers.") else name
    for part in (n for n in matrices(weights) if n.startswith(layer)):
        weights[part] = weights[part].clone()
        weights[part][len(weights[part]) // 2 :] = 0
    return f"{layer}*"


def interleaved(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """Rows of both halves in turn: the other layout of rotary embeddings, or of gate and up in one tensor."""
    name = rng.choice(matrices(weights))
    half = len(weights[name]) // 2
    weights[name] = weights[name].view(2, half, -1).transpose(0, 1).reshape(weights[name].shape).contiguous()
    return name


def misread(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """The bits of bfloat16 read as float16: a factor, nearly."""
    name = rng.choice(unnormalised(weights))
    dtype = weights[name].dtype
    weights[name] = weights[name].to(torch.bfloat16).view(torch.float16).to(dtype).nan_to_num(0.0)
    return name


def stale(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """Nothing arrived for some steps."""
    weights.update(earlier[STEPS_MISSED - 1])
    return f"all, {STEPS_MISSED} steps"


def stale_bucket(weights: dict[str, Tensor], earlier: Sequence[Weights], rng: random.Random) -> str:
    """One of three buckets did not arrive for some steps."""
    names = list(weights)
    third = -(-len(names) // 3)
    start = rng.randrange(3) * third
    for name in names[start : start + third]:
        weights[name] = earlier[STEPS_MISSED - 1][name]
    return f"tensors {start} to {start + third - 1}, {STEPS_MISSED} steps"


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        zeroed, scaled, swapped, transposed, truncated, interleaved, misread, stale, stale_bucket,
    )
}  # fmt: skip
