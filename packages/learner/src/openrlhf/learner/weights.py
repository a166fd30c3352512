"""The weight stream: whole parameters by their Hugging Face names, in buckets, the same on every rank.

Who sends them where is the caller's affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.modules import LearnerModule

GATHER_BYTES = 512 * 2**20
"""What is gathered at once to be written."""


@dataclass(frozen=True, kw_only=True)
class WeightInfo:
    """One tensor of the stream: its name in a Hugging Face checkpoint, full shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _parameters(module: LearnerModule, skip_frozen: bool) -> list[tuple[str, nn.Parameter]]:
    """Tied weights once, under the name of their first owner (the input embedding)."""
    named = [(module.hf_name(name), p) for name, p in module.named_parameters()]
    return [(name, p) for name, p in named if p.requires_grad or not skip_frozen]


def metadata(engine: TrainingEngine, *, skip_frozen: bool) -> list[WeightInfo]:
    """What the stream will hold, in order. Not collective."""
    parameters = _parameters(engine.module, skip_frozen)
    meta = [(name, torch.empty(engine.full_shape(p), dtype=p.dtype, device="meta")) for name, p in parameters]
    return [WeightInfo(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in checkpoint_form(engine.module, meta)]


def checkpoint_form(module: LearnerModule, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The same tensors as a Hugging Face file holds them.

    transformers 5 fuses some of them on loading (the experts of a mixture); engines read the form of the files.
    """
    if module.scalar or not getattr(module.model, "_weight_conversions", None):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    converted: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        converted += revert_weight_conversion(module.model, {name: tensor}).items()
    return [(name, tensor.contiguous()) for name, tensor in converted]


def buckets(
    engine: TrainingEngine, bucket_bytes: int, *, skip_frozen: bool, wanted: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of (name, full tensor), the same on every rank; empty ones where they are not wanted. Collective.

    Names and shapes are those of the parameters in memory.

    The tensors may be the live parameters: they are valid until the next bucket is asked for, and must not be changed.
    bucket_bytes: a bucket closes when the next parameter would exceed it; a larger parameter is a bucket of its own.
    wanted: whether this rank has a use for them; else it only takes part in the communication.
    """
    if bucket_bytes < 1:
        raise ValueError(f"`bucket_bytes` must be positive, got {bucket_bytes!r} bytes")
    groups = list(_split(engine, _parameters(engine.module, skip_frozen), bucket_bytes))
    tensors = engine.whole(([p for _, p in group] for group in groups), wanted=wanted)
    for group, whole in zip(groups, tensors, strict=True):
        yield [(name, tensor) for (name, _), tensor in zip(group, whole, strict=True)] if wanted else []


def count_buckets(engine: TrainingEngine, bucket_bytes: int) -> int:
    """How many `buckets` there are. Not collective."""
    return sum(1 for _ in _split(engine, _parameters(engine.module, skip_frozen=False), bucket_bytes))


def checkpoint_buckets(
    engine: TrainingEngine, bucket_bytes: int, *, skip_frozen: bool, wanted: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """`buckets` in the form of a Hugging Face file: what an inference engine loads, as `metadata` announces it."""
    for bucket in buckets(engine, bucket_bytes, skip_frozen=skip_frozen, wanted=wanted):
        yield checkpoint_form(engine.module, bucket)


def _split(
    engine: TrainingEngine, parameters: list[tuple[str, nn.Parameter]], limit: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        need = math.prod(engine.full_shape(parameter)) * parameter.element_size()
        if group and size + need > limit:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += need
    if group:
        yield group
