"""The trainer's end of a weight push on GPUs, on vLLM's own backends: nccl, and CUDA IPC for colocated engines.

Needs vLLM and CUDA in the trainer's process; gloo (`sender.py`) needs neither. Same life as `WeightSender`: open,
connect, send, close.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

from openrlhf.rollout.weights.wire import BucketPlan, TensorSpec, torch_dtype

NUM_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class NcclAddress:
    """Where an nccl group meets; field names are those of vLLM's init info."""

    master_address: str
    master_port: int
    world_size: int
    packed_buffer_size_bytes: int
    packed: bool = True
    packed_num_buffers: int = NUM_BUFFERS

    def for_engine(self, rank_offset: int) -> dict[str, Any]:
        """The init info of an engine whose first worker has this rank."""
        return {**asdict(self), "rank_offset": rank_offset}


@dataclass(frozen=True, kw_only=True)
class IpcAddress:
    """CUDA IPC needs no meeting point."""

    packed: bool = True

    def for_engine(self, rank_offset: int) -> dict[str, Any]:
        """The init info of any engine."""
        return {"packed": self.packed}


class NcclSender:
    """Rank 0 of an nccl group with all engine workers. A push that fails leaves the group unusable: open a new one."""

    def __init__(self, *, master_address: str, bucket_bytes: int) -> None:
        self._master_address = master_address
        self._bucket_bytes = bucket_bytes
        self._address: NcclAddress | None = None
        self._group: Any = None

    def open(self, world_size: int, generation: int) -> NcclAddress:
        """Choose a port for a new group; every generation meets at another one, so `generation` itself isn't sent."""
        self.close()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self._address = NcclAddress(
            master_address=self._master_address,
            master_port=port,
            world_size=world_size,
            packed_buffer_size_bytes=self._bucket_bytes,
        )
        return self._address

    def connect(self) -> None:
        """Wait for the engine workers; uses this process' current device."""
        assert self._address is not None, "open a group first"
        self._group = trainer_init(asdict(self._address))

    def send(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan, version: int) -> None:
        """Broadcast the stream in packed buffers; the engines cut it by the same rule from the plan's order."""
        assert self._group is not None, "connect the group first"
        packed_nccl_broadcast_producer(
            iterator=follow_plan(stream, plan),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self._bucket_bytes,
            num_buffers=NUM_BUFFERS,
        )

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.destroy()
        self._group = None


class IpcSender:
    """Hands engines on the same GPUs a view of the trainer's buffers. Lives on every trainer rank.

    deliver: called on rank 0 with one message for all engines (`VllmEngine.update_weights`); it must return only when
    they have loaded it. The launcher calls `start_weight_update` before and `finish_weight_update` after the push.
    """

    def __init__(self, *, rank: int, bucket_bytes: int, deliver: Callable[[dict[str, Any]], None]) -> None:
        self._info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=bucket_bytes)
        self._client = _DeliverOnly(deliver)

    def open(self, world_size: int, generation: int) -> IpcAddress:
        """Nothing to open."""
        return IpcAddress()

    def connect(self) -> None:
        """Nothing to connect."""

    def send(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan, version: int) -> None:
        """All ranks together: share the stream buffer by buffer."""
        source = _PlannedSource(stream, plan)
        IPCTrainerWeightTransferEngine.trainer_init(self._info, client=self._client, source=source).send_weights()

    def close(self) -> None:
        """Nothing to close."""


def follow_plan(stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan) -> Iterator[tuple[str, Tensor]]:
    """The stream's tensors in wire dtype, checked against the plan one by one.

    Raises ValueError at the first that differs: the two ends would cut the stream differently and hang.
    """
    expected: Iterator[TensorSpec] = iter(plan.tensors)
    for chunk in stream:
        for name, tensor in chunk:
            spec = next(expected, None)
            if spec is None or (name, tuple(tensor.shape)) != (spec.name, spec.shape):
                raise ValueError(f"the trainer streams {name!r} {tuple(tensor.shape)}, the push plan says {spec!r}")
            yield name, tensor.detach().to(torch_dtype(spec.dtype))
    missing = next(expected, None)
    if missing is not None:
        raise ValueError(f"the trainer's stream ended before {missing.name!r}")


class _PlannedSource(WeightSource):
    """One push's stream in the form vLLM's trainer engines take."""

    def __init__(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan) -> None:
        self._stream = stream
        self._plan = plan

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(t.name, torch_dtype(t.dtype), t.shape) for t in self._plan.tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return follow_plan(self._stream, self._plan)


class _DeliverOnly:
    """vLLM's client protocol, of which only the transfer itself happens here: the launcher drives the rest."""

    def __init__(self, deliver: Callable[[dict[str, Any]], None]) -> None:
        self._deliver = deliver

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None:
        self._deliver(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
