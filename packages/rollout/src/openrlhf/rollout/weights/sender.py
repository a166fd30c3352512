"""The trainer's end of a weight push on CPU, in shared memory and over gloo.

Plain torch: the trainer's process never imports vLLM for it.

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
from openrlhf.rollout.weights.shared import SHARED_BUCKET_BYTES
from openrlhf.rollout.weights.wire import BucketPlan, Packer, new_memory

IN_FLIGHT = 2
"""Buckets in the air over gloo while the next one is packed: enough to hide packing, and a bound on memory."""


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

    def __init__(
        self, *, master_address: str = "127.0.0.1", timeout_s: float = GROUP_TIMEOUT_S, shared: bool = True
    ) -> None:
        """shared: workers on this host read in shared memory; else all take gloo."""
        self._master_address = master_address
        self._timeout_s = timeout_s
        self._shared = shared
        self._group: WeightGroup | None = None

    def open(self, world_size: int, generation: int) -> GroupAddress:
        """Open the meeting point of a new group (1 + all engine workers). Does not wait; drops an older group."""
        self.close()
        self._group = WeightGroup.host(
            master_address=self._master_address,
            world_size=world_size,
            generation=generation,
            timeout_s=self._timeout_s,
            shared=self._shared,
        )
        return self._group.address

    def connect(self) -> None:
        """Wait until every engine worker has joined. Raises RuntimeError after the time-out."""
        assert self._group is not None, "open a group first"
        self._group.connect()

    def message_bytes(self, most: int) -> int:
        """The best size of messages up to `most` bytes: small ones where engine workers load them as they come."""
        near = self._group is not None and self._group.shared is not None
        return min(most, SHARED_BUCKET_BYTES) if near else most

    def send(self, stream: Iterable[Sequence[tuple[str, Tensor]]], plan: BucketPlan, version: int) -> SendReport:
        """Send the plan's tensors as they arrive, one message per bucket.

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
        flying: deque[tuple[dist.Work | None, Tensor]] = deque()
        shared = group.shared

        def land() -> None:
            work, flat = flying.popleft()
            if work is not None:
                work.wait()
            if shared is not None:
                shared.give(flat)

        def launch(flat: Tensor) -> None:
            if shared is not None:
                shared.announce(flat)
            flying.append((group.broadcast(flat) if group.far else None, flat))
            while flying and (flying[0][0] is None or len(flying) > IN_FLIGHT):
                land()

        try:
            if shared is not None:
                shared.begin(version, plan.digest)
            if group.far:
                group.broadcast(header(plan, version)).wait()
            packer = Packer(plan, new_memory if shared is None else shared.take)
            for chunk in stream:
                for name, tensor in chunk:
                    for flat in packer.add(name, tensor):
                        launch(flat)
            packer.finish()
            while flying:
                land()
            if shared is not None:
                shared.finish()
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
