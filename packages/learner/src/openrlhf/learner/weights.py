"""The weight stream: full parameters by their Hugging Face names, gathered in buckets under ZeRO-3."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.tensor_parallel import TensorParallel, shard_of


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


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, also while it is partitioned or cut."""
    shard = shard_of(parameter)
    return shard.shape if shard is not None else tuple(getattr(parameter, "ds_shape", parameter.shape))


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """Within it the parameters are whole on every rank (collective under ZeRO-3, else nothing)."""
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)


def metadata(module: LearnerModule, *, skip_frozen: bool) -> list[WeightInfo]:
    """What the stream will send, in order."""
    parameters = _parameters(module, skip_frozen)
    meta = [(name, torch.empty(full_shape(p), dtype=p.dtype, device="meta")) for name, p in parameters]
    return [WeightInfo(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in checkpoint_form(module, meta)]


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
    module: LearnerModule,
    tensor_parallel: TensorParallel,
    bucket_bytes: int,
    *,
    skip_frozen: bool,
    everywhere: bool = False,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of (name, full tensor) on rank 0 and empty lists elsewhere; collective.

    Names and shapes are those of the parameters in memory.

    The tensors are the live parameters: they are valid until the next bucket is asked for, and must not be changed.
    bucket_bytes: a bucket closes when the next parameter would exceed it; a larger parameter is a bucket of its own.
    everywhere: yield the tensors on every rank, each of which has engines of its own to serve.
    """
    if bucket_bytes < 1:
        raise ValueError(f"`bucket_bytes` must be positive, got {bucket_bytes!r} bytes")
    sender = everywhere or not dist.is_initialized() or dist.get_rank() == 0
    makes_whole = everywhere or tensor_parallel.has_rank_0
    for group in _split(_parameters(module, skip_frozen), bucket_bytes):
        with torch.no_grad(), gathered([p for _, p in group]):
            whole = [(n, tensor_parallel.whole(p, p.data)) for n, p in group] if makes_whole else []
            yield whole if sender else []


def checkpoint_buckets(
    module: LearnerModule,
    tensor_parallel: TensorParallel,
    bucket_bytes: int,
    *,
    skip_frozen: bool,
    everywhere: bool = False,
) -> Iterator[list[tuple[str, Tensor]]]:
    """`buckets` in the form of a Hugging Face file: what an engine loads, as `metadata` announces it."""
    stream = buckets(module, tensor_parallel, bucket_bytes, skip_frozen=skip_frozen, everywhere=everywhere)
    for bucket in stream:
        yield checkpoint_form(module, bucket)


def _split(parameters: list[tuple[str, nn.Parameter]], limit: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        need = torch.Size(full_shape(parameter)).numel() * parameter.element_size()
        if group and size + need > limit:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += need
    if group:
        yield group
