"""The wire format of a weight push: which tensors travel in which bucket, and how they lie in it.

Plain torch, no process group, no vLLM: both ends import it. A bucket is one flat tensor of one dtype, sent as one
message. The plan is made once from names, dtypes and shapes; it crosses process borders as plain dicts.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

ADAPTER_PREFIX = "base_model.model."
"""Begins the names of an adapter's tensors (peft's way); all others are those of a Hugging Face checkpoint."""


def is_adapter(name: str) -> bool:
    """Whether a tensor of a push is a part of an adapter."""
    return name.startswith(ADAPTER_PREFIX)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter on the wire: its Hugging Face name, wire dtype ("float32", "bfloat16", ...) and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that lie one after the other in one flat message."""

    tensors: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one push in the order in which they are sent.

    A plan may leave out layers that never change (frozen ones) after the first push; it must not leave out single
    parameters of a layer that the engine fuses (q, k, v or gate, up).
    """

    buckets: tuple[Bucket, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        return [t for bucket in self.buckets for t in bucket.tensors]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def moves_base(self) -> bool:
        """Whether there is anything beside an adapter."""
        return not all(is_adapter(t.name) for t in self.tensors)

    @cached_property
    def digest(self) -> int:
        """A checksum by which sender and receiver notice that they hold different plans."""
        return zlib.crc32(json.dumps(self.to_dict(), separators=(",", ":")).encode())

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and ints: what a remote call can carry."""
        return {"buckets": [[[t.name, t.dtype, list(t.shape)] for t in b.tensors] for b in self.buckets]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BucketPlan:
        """The inverse of `to_dict`."""
        return cls(tuple(Bucket(tuple(TensorSpec(n, d, tuple(s)) for n, d, s in b)) for b in data["buckets"]))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name. Raises ValueError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def specs_of(named: Iterable[tuple[str, Tensor]], dtype: str | None = None) -> list[TensorSpec]:
    """Specs of named tensors. `dtype`: the wire dtype of floating-point tensors; None keeps each tensor's own."""
    specs = []
    for name, tensor in named:
        own = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype if dtype and tensor.is_floating_point() else own, tuple(tensor.shape)))
    return specs


def aligned(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors with wire dtypes that let them lie one behind the other, every number at a multiple of its size.

    Upstream fault (vLLM 0.32): its receivers view the bytes of a message as numbers where they lie, which torch refuses
    behind an odd number of narrower ones (three bf16 before fp32). Such a tensor travels in the widest dtype of all,
    which holds its numbers exactly; the engine casts it back. Can go once vLLM pads its messages.
    """
    widest = max((s.dtype for s in specs), key=lambda name: torch_dtype(name).itemsize, default="float32")
    size = torch_dtype(widest).itemsize
    return [s if s.nbytes % size == 0 else replace(s, dtype=widest) for s in specs]


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> BucketPlan:
    """Distribute tensors, in the order in which the trainer streams them, over buckets of at most `bucket_bytes`.

    A bucket closes when the next tensor has another dtype or would not fit, so the plan keeps the stream's order. A
    tensor larger than a bucket gets one of its own. Raises ValueError for an empty list, a repeated name or a bucket
    size below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket size must be at least 1 byte, got {bucket_bytes!r}; see `bucket_bytes`")
    buckets: list[Bucket] = []
    held: list[TensorSpec] = []
    room = 0
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"weight {spec.name!r} appears twice in the trainer's stream")
        seen.add(spec.name)
        if held and (spec.nbytes > room or spec.dtype != held[0].dtype):
            buckets.append(Bucket(tuple(held)))
            held = []
        room = (room if held else bucket_bytes) - spec.nbytes
        held.append(spec)
    if not held:
        raise ValueError("a weight push needs at least one tensor")
    return BucketPlan((*buckets, Bucket(tuple(held))))


def check_header(got_version: int, got_digest: int, *, plan: BucketPlan, version: int) -> None:
    """Raises RuntimeError when a push, as its first message says, has not this version or another plan."""
    if (got_version, got_digest) != (version, plan.digest):
        raise RuntimeError(
            f"the trainer pushes version {got_version} (plan {got_digest}), this engine was told version {version} "
            f"(plan {plan.digest})"
        )


def new_memory(bucket: Bucket) -> Tensor:
    """A flat tensor for this bucket."""
    return torch.empty(bucket.numel, dtype=torch_dtype(bucket.dtype))


class Packer:
    """Fills the plan's buckets from a stream of tensors; each bucket comes out once it is full.

    The stream must bring exactly the plan's tensors, in any order that completes the buckets one after the other.
    Tensors are cast to the wire dtype and copied, so the caller may free or change them at once.

    allocate: gives the flat tensor that a bucket is packed into.
    """

    def __init__(self, plan: BucketPlan, allocate: Callable[[Bucket], Tensor] = new_memory) -> None:
        self._plan = plan
        self._allocate = allocate
        self._place: dict[str, tuple[int, int, TensorSpec]] = {}
        for number, bucket in enumerate(plan.buckets):
            offset = 0
            for spec in bucket.tensors:
                self._place[spec.name] = (number, offset, spec)
                offset += spec.numel
        self._flat: dict[int, Tensor] = {}
        self._missing = [len(b.tensors) for b in plan.buckets]
        self._next = 0

    def add(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Copy one tensor in; returns the flat buckets that this completed, in sending order.

        Raises ValueError for a tensor that is unknown, repeated or of another shape.
        """
        if name not in self._place:
            raise ValueError(f"weight {name!r} is not in the push plan, or came twice")
        number, offset, spec = self._place.pop(name)
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, the push plan says {spec.shape}")
        flat = self._flat.get(number)
        if flat is None:
            flat = self._flat[number] = self._allocate(self._plan.buckets[number])
        flat[offset : offset + spec.numel].copy_(tensor.detach().reshape(-1))
        self._missing[number] -= 1
        done = []
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            done.append(self._flat.pop(self._next))
            self._next += 1
        return done

    def finish(self) -> None:
        """Raises ValueError when tensors of the plan never came."""
        if self._place:
            names = sorted(self._place)
            raise ValueError(f"the trainer's stream ended without {len(names)} planned weights, the first {names[0]!r}")


def unpack(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and view of each tensor in a flat bucket. The views share the bucket's memory."""
    offset = 0
    for spec in bucket.tensors:
        yield spec.name, flat[offset : offset + spec.numel].view(spec.shape)
        offset += spec.numel
