"""The trainer's end of a weight push on GPUs: vLLM's own trainer engines for nccl, and for CUDA IPC when engines are
colocated.

Needs vLLM and CUDA in the trainer's process; gloo (`sender.py`) needs neither. Same life as `WeightSender`: open,
connect, send, close. Unlike there, vLLM's trainer engine drives the engines itself, through a client; a failed call
of an engine ends the push.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from openrlhf.rollout.weights.group import GROUP_TIMEOUT_S
from openrlhf.rollout.weights.guard import GuardedGroup, bounded
from openrlhf.rollout.weights.wire import BucketPlan, TensorSpec, torch_dtype

NUM_BUFFERS = 1
"""One CUDA stream on both sides. With vLLM's default of two, buffers cross streams: engines keep views of a message
until its layer is complete (an expert layer spans many), then copy them on the stream of a later message, which neither
waits for the earlier one nor keeps its memory from being received into. The trainer's gathered tensors likewise."""


class Engines(Protocol):
    """All engines of a run behind vLLM's client protocol; every call returns once each of them has answered.

    Raises an exception as soon as an engine is gone or refuses.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class NcclSender:
    """Rank 0 of an nccl group with all engine workers. A push that fails leaves the group unusable: open a new one.

    buffer_bytes: a message closes when it holds more than this. timeout_s: longest wait for a peer, as in
    `WeightSender`.
    """

    def __init__(
        self, *, master_address: str, buffer_bytes: int, engines: Engines, timeout_s: float = GROUP_TIMEOUT_S
    ) -> None:
        self._master_address = master_address
        self._buffer_bytes = buffer_bytes
        self._engines = _PushClient(engines)
        self._source = _PushSource()
        self._timeout_s = timeout_s
        self._address: NCCLTrainerInitInfo | None = None
        self._trainer: NCCLTrainerWeightTransferEngine | None = None

    def open(self, world_size: int, generation: int) -> None:
        """Choose a port for a new group of 1 + all engine workers; every generation meets at another one."""
        self.close()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self._address = NCCLTrainerInitInfo(
            rank=0,
            master_address=self._master_address,
            master_port=port,
            world_size=world_size,
            packed_buffer_size_bytes=self._buffer_bytes,
            packed_num_buffers=NUM_BUFFERS,
        )

    def connect(self) -> None:
        """Let the engine workers join and meet them; uses this process' current device. Raises RuntimeError in time."""
        address = self._address
        assert address is not None, "open a group first"
        trainer = bounded(
            "meet the engines",
            lambda: NCCLTrainerWeightTransferEngine.trainer_init(address, client=self._engines, source=self._source),
            device=torch.accelerator.current_device_index() if torch.cuda.is_available() else None,
            timeout_s=self._timeout_s,
        )
        self._engines.group = GuardedGroup(cast(Any, trainer.model_update_group), timeout_s=self._timeout_s)
        trainer.model_update_group = cast(Any, self._engines.group)
        self._trainer = trainer

    def send(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan, version: int) -> None:
        """One push: start, broadcast in packed messages, finish. The engines cut the stream by the plan's order.

        Raises RuntimeError when an engine fails or falls silent, ValueError when the stream doesn't follow the plan.
        Either way the group is closed.
        """
        group = self._engines.group
        assert self._trainer is not None, "open and connect a group first"
        assert group is not None, "a connected sender has a group"
        self._source.begin(stream, plan)
        self._engines.begin(version)
        torch.cuda.current_stream().synchronize()  # the broadcast's own stream does not wait for the last step's
        try:
            with group.transfer():
                self._trainer.send_weights()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group; engines that wait for a message give up by themselves."""
        if self._trainer is not None:
            self._trainer.shutdown()
        self._trainer = None
        self._engines.group = None


class IpcSender:
    """Hands engine workers on the same GPUs a view of the trainer's buffer. Lives on every trainer rank.

    buffer_bytes: of the buffer in device memory; no tensor may be larger.
    """

    def __init__(self, *, rank: int, buffer_bytes: int, engines: Engines) -> None:
        self._info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
        self._engines = _PushClient(engines, stay_in_step=True)
        self._source = _PushSource()
        self._trainer: IPCTrainerWeightTransferEngine | None = None

    def open(self, world_size: int, generation: int) -> None:
        """Nothing to open: CUDA IPC needs no meeting point."""

    def connect(self) -> None:
        """Rank 0 tells the engines what will come."""
        self._trainer = IPCTrainerWeightTransferEngine.trainer_init(
            self._info, client=self._engines, source=self._source
        )

    def send(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan, version: int) -> None:
        """One push, all ranks together: each shares the whole stream buffer by buffer with the workers on its device.

        When an engine fails, the ranks go through the rest of the stream without it, so that they stay in step; then
        its error is raised on rank 0.
        """
        assert self._trainer is not None, "connect first"
        self._source.begin(stream, plan)
        self._engines.begin(version)
        self._trainer.send_weights()
        self._engines.raise_failure()

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


class _PushSource(WeightSource):
    """The stream of the push that `begin` announced, in the form vLLM's trainer engines take."""

    def begin(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan) -> None:
        self._stream, self._plan = stream, plan

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(t.name, torch_dtype(t.dtype), t.shape) for t in self._plan.tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return follow_plan(self._stream, self._plan)


class _PushClient:
    """The engines as vLLM's trainer engines call them; adds the version, and what a failure must set off.

    nccl: it aborts the group, since the broadcast would wait for the engine that failed. stay_in_step (ipc): it is kept
    until the end, since the other ranks wait for this one after every message.
    """

    def __init__(self, engines: Engines, *, stay_in_step: bool = False) -> None:
        self._engines = engines
        self._stay_in_step = stay_in_step
        self._failure: Exception | None = None
        self._version = 0
        self.group: GuardedGroup | None = None

    def begin(self, version: int) -> None:
        self._version = version
        self._failure = None

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engines.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._call(self._engines.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._call(self._engines.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._engines.finish_weight_update, str(self._version))

    def _call(self, method: Any, *args: Any) -> None:
        if self._failure is not None:
            return
        group = self.group
        try:
            if group is None:
                method(*args)
            else:
                group.while_alive(lambda: method(*args))
        except Exception as error:
            if group is not None:
                group.abort(f"weight push {self._version}: {error}")
            if not self._stay_in_step:
                raise
            self._failure = error
