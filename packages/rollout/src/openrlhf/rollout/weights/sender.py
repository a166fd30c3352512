"""The trainer's end of a weight push over gloo. Plain torch: the trainer's process never imports vLLM for it.

One push: the launcher gives `plan` and `version` to every engine (`VllmEngine.receive_weights`) and at the same time
calls `send` on the trainer's rank 0; the other trainer ranks only take part in gathering the stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.rollout.weights.group import GROUP_TIMEOUT_S, GroupAddress, WeightGroup
from openrlhf.rollout.weights.wire import BucketPlan, Packer

IN_FLIGHT = 2
"""Buckets in the air while the next one is packed: enough to hide packing, and a bound on memory."""


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """What one push moved: payload bytes per engine worker, messages, seconds."""

    nbytes: int
    messages: int
    seconds: float


class WeightSender:
    """Rank 0 of the weight group.

    open → (engines: init_weight_transfer) + connect → any number of send → close. After a failed push: open again
    with the next generation and send everything.
    """

    def __init__(self, *, master_address: str = "127.0.0.1", timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self._master_address = master_address
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None

    def open(self, world_size: int, generation: int) -> GroupAddress:
        """Open the meeting point of a new group (1 + all engine workers). Does not wait; drops an older group."""
        self.close()
        self._group = WeightGroup.host(
            master_address=self._master_address,
            world_size=world_size,
            generation=generation,
            timeout_s=self._timeout_s,
        )
        return self._group.address

    def connect(self) -> None:
        """Wait until every engine worker has joined. Raises RuntimeError after the time-out."""
        assert self._group is not None, "open a group first"
        self._group.connect()

    def send(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan, version: int) -> SendReport:
        """Broadcast the plan's tensors as they arrive, one message per bucket.

        stream: the trainer's buckets of (name, full tensor), on any device; its cuts don't matter, its order does.
        Raises RuntimeError when an engine is gone (close and open a new generation), ValueError when the stream
        doesn't follow the plan. Either way the group is closed, so that no engine waits for the rest.
        """
        assert self._group is not None, "open and connect a group first"
        began = time.perf_counter()
        try:
            self._send(self._group, stream, plan, version)
        except BaseException:
            self.close()
            raise
        return SendReport(nbytes=plan.nbytes, messages=len(plan.buckets) + 1, seconds=time.perf_counter() - began)

    def _send(
        self, group: WeightGroup, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan, version: int
    ) -> None:
        flying: deque[tuple[dist.Work, Tensor]] = deque()

        def launch(flat: Tensor) -> None:
            while len(flying) >= IN_FLIGHT:
                flying.popleft()[0].wait()
            flying.append((group.broadcast(flat), flat))

        try:
            launch(header(plan, version))
            packer = Packer(plan)
            for chunk in stream:
                for name, tensor in chunk:
                    for flat in packer.add(name, tensor):
                        launch(flat)
            packer.finish()
            while flying:
                flying.popleft()[0].wait()
        finally:
            flying.clear()  # unfinished sends would keep the connections open after a failure

    def close(self) -> None:
        """Leave the group; engines that wait for a message get an error at once."""
        if self._group is not None:
            self._group.close()
        self._group = None


def header(plan: BucketPlan, version: int) -> Tensor:
    """The first message of a push: which version, and which plan it follows."""
    return torch.tensor([version, plan.digest], dtype=torch.int64)


class Sender(Protocol):
    """The trainer's end of a weight transfer. Over nccl and CUDA IPC it is a class of `cuda_sender.py`."""

    def open(self, world_size: int, generation: int) -> Any: ...

    def connect(self) -> None: ...

    def send(self, stream: Iterable[list[tuple[str, Tensor]]], plan: BucketPlan, version: int) -> Any: ...

    def close(self) -> None: ...


def send_or_drain(sender: Sender | None, stream: Iterator[Any], plan: BucketPlan, version: int) -> None:
    """What every trainer rank does in a push: send its stream, or only take part in gathering it.

    A sender that fails leaves the stream half-way; the rest is gathered all the same, since the other ranks would wait
    for this one in the middle of it, and meet the next push there.
    """
    try:
        if sender is not None:
            sender.send(stream, plan, version)
    finally:
        for _ in stream:
            pass
