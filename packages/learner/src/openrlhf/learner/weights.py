"""The weight stream: whole parameters by their Hugging Face names, in buckets, the same on every rank.

Who sends them where is the caller's affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.lora_stream import Form, Streamed, is_apart, streamed
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


def metadata(engine: TrainingEngine, *, skip_frozen: bool, form: Form = "merged") -> list[WeightInfo]:
    """What the stream will hold, in order. Not collective. See `lora_stream.streamed`."""
    items = streamed(engine.module, skip_frozen=skip_frozen, form=form)
    shapes = (item.shape_in_full or engine.full_shape(item.parameters[0]) for item in items)
    meta = [
        (item.name, torch.empty(shape, dtype=item.dtype, device="meta"))
        for item, shape in zip(items, shapes, strict=True)
    ]
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
        if is_apart(name):
            converted.append((name, tensor))
        else:
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
    yield from _stream(engine, _in_memory(engine.module, skip_frozen), bucket_bytes, wanted=wanted)


def count_buckets(engine: TrainingEngine, bucket_bytes: int) -> int:
    """How many `buckets` there are. Not collective."""
    return sum(1 for _ in _split(engine, _in_memory(engine.module, skip_frozen=False), bucket_bytes))


def checkpoint_buckets(
    engine: TrainingEngine, bucket_bytes: int, *, skip_frozen: bool, wanted: bool = True, form: Form = "merged"
) -> Iterator[list[tuple[str, Tensor]]]:
    """What an inference engine loads, in the form of a Hugging Face file, as `metadata` announces it. Collective.

    Otherwise as `buckets`; bytes of a bucket are those of its parameters, with the adapters that are merged.
    """
    items = streamed(engine.module, skip_frozen=skip_frozen, form=form)
    for bucket in _stream(engine, items, bucket_bytes, wanted=wanted):
        yield checkpoint_form(engine.module, bucket)


def _in_memory(module: LearnerModule, skip_frozen: bool) -> list[Streamed]:
    """Tied weights once, under the name of their first owner (the input embedding)."""
    return [
        Streamed(module.hf_name(name), (p,), lambda whole: whole[0])
        for name, p in module.named_parameters()
        if p.requires_grad or not skip_frozen
    ]


def _stream(
    engine: TrainingEngine, items: list[Streamed], limit: int, *, wanted: bool
) -> Iterator[list[tuple[str, Tensor]]]:
    groups = list(_split(engine, items, limit))
    tensors = engine.whole(([p for item in group for p in item.parameters] for group in groups), wanted=wanted)
    for group, whole in zip(groups, tensors, strict=True):
        rest = iter(whole)
        yield [(item.name, item.make([next(rest) for _ in item.parameters])) for item in group] if wanted else []


def _split(engine: TrainingEngine, items: list[Streamed], limit: int) -> Iterator[list[Streamed]]:
    group: list[Streamed] = []
    size = 0
    for item in items:
        need = sum(math.prod(engine.full_shape(p)) * p.element_size() for p in item.parameters)
        if group and size + need > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += need
    if group:
        yield group
