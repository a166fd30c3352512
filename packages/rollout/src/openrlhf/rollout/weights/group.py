"""The group of the trainer's rank 0 and every engine worker: shared memory within a host, gloo between hosts.

Which way a worker takes shows when it joins: shared memory where it reaches the sender's meeting point on its own host
(`shared.py`), else gloo. A push may go both ways.

The gloo group is built from a store and a backend object alone, so it touches none of torch.distributed's global state:
the trainer and the engines keep their own default groups. Every group has a generation; after a failed push a new group
of the next generation is made, since survivors of a broken group cannot be trusted to be in step.
"""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    DistError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from openrlhf.rollout.weights.shared import SharedReceiver, SharedSender, listen
from openrlhf.rollout.weights.wire import Bucket, BucketPlan, check_header, new_memory, unpack

log = logging.getLogger(__name__)

SHARED, GLOO = "shared", "gloo"
GROUP_TIMEOUT_S = 15.0
"""Longest wait for a peer, in a rendezvous or in one message. Survivors of a dead peer block that long."""


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """Where a group meets. The sender is rank 0; engine workers take the ranks from their offset on.

    local: name of the meeting point of workers on the sender's host; empty: all take gloo.
    """

    master_address: str
    master_port: int
    world_size: int
    generation: int
    timeout_s: float = GROUP_TIMEOUT_S
    local: str = ""

    def for_engine(self, rank_offset: int) -> dict[str, Any]:
        """The init info of an engine whose first worker has this rank."""
        return {**asdict(self), "rank_offset": rank_offset}


class WeightGroup:
    """One rank's end of a group. Make it with `host` (rank 0) or `join`.

    shared: rank 0's end towards workers on its host, once connected; None: there are none. far: whether a worker takes
    gloo.
    """

    def __init__(self, address: GroupAddress, rank: int, store: Store) -> None:
        self.address = address
        self.rank = rank
        self.shared: SharedSender | None = None
        self._listener: socket.socket | None = None
        self._receiver: SharedReceiver | None = None
        self._store: Store | None = store
        self._stream: Generator[tuple[str, Tensor], None, None] | None = None
        self._group: Any = None  # a ProcessGroupGloo; its methods are not in torch's type stubs

    @property
    def far(self) -> bool:
        return self._group is not None

    @classmethod
    def host(
        cls, *, master_address: str, world_size: int, generation: int, timeout_s: float, shared: bool = True
    ) -> WeightGroup:
        """Open the meeting point on a free port and return without waiting for anybody. shared: use shared memory."""
        store = TCPStore(
            master_address,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        listener, local = _listen() if shared else (None, "")
        address = GroupAddress(
            master_address=master_address,
            master_port=store.port,
            world_size=world_size,
            generation=generation,
            timeout_s=timeout_s,
            local=local,
        )
        group = cls(address, 0, store)
        group._listener = listener
        return group

    @classmethod
    def join(cls, address: GroupAddress, rank: int) -> WeightGroup:
        """Reach the meeting point and wait for the others. Raises RuntimeError after the group's time-out."""
        store = _named(
            address,
            rank,
            "reach the sender",
            lambda: TCPStore(
                address.master_address,
                address.master_port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=address.timeout_s),
            ),
        )
        group = cls(address, rank, store)
        group.connect()
        return group

    def connect(self) -> None:
        """Wait for all ranks. Raises RuntimeError after the group's time-out."""
        _named(self.address, self.rank, "meet the other ranks", self._meet)

    def _meet(self) -> None:
        assert self._store is not None, "the group is closed"
        store = PrefixStore(f"openrlhf-weights-{self.address.generation}", self._store)
        timeout_s = self.address.timeout_s
        timeout = datetime.timedelta(seconds=timeout_s)
        if self.rank:
            self._receiver = SharedReceiver.reach(self.address.local, self.rank, timeout_s=timeout_s)
            store.set(f"way-{self.rank}", GLOO if self._receiver is None else SHARED)
            if self._receiver is not None:
                self._receiver.meet()
                return
            store.wait([f"place-{self.rank}"], timeout)
            place, size = map(int, store.get(f"place-{self.rank}").split())
            self._group = ProcessGroupGloo(store, place, size, timeout)
            return
        workers = range(1, self.address.world_size)
        names = [f"way-{rank}" for rank in workers]
        store.wait(names, timeout)
        ways = dict(zip(workers, store.multi_get(names), strict=True))
        far = [rank for rank, way in ways.items() if way.decode() == GLOO]
        near = [rank for rank, way in ways.items() if way.decode() != GLOO]
        for place, rank in enumerate(far, start=1):  # told to each, who would else have to ask for every other's way
            store.set(f"place-{rank}", f"{place} {1 + len(far)}")
        if near:
            assert self._listener is not None, "workers reach no meeting point that is not there"
            self.shared = SharedSender(self._listener, timeout_s=timeout_s)
            self.shared.accept(near)
        log.info("weights go to %d engine workers in shared memory, to %d over gloo", len(near), len(far))
        if far:
            self._group = ProcessGroupGloo(store, 0, 1 + len(far), timeout)

    def broadcast(self, tensor: Tensor) -> Work:
        """Over gloo: start sending (rank 0) or receiving a contiguous CPU tensor; wait on the returned handle."""
        assert self._group is not None, "connect the group first"
        return self._group.broadcast(tensor, 0)

    def receive(self, plan: BucketPlan, version: int) -> Iterator[tuple[str, Tensor]]:
        """All tensors of a push as an engine worker gets it; the next bucket is received while one is used.

        Tensors keep their memory while something refers to them: vLLM keeps views until their layer is complete. Raises
        RuntimeError when the sender is gone, or follows another plan or version than this engine was told.
        """
        receive = self._receive if self._receiver is None else self._receiver.receive
        self._stream = receive(plan, version)
        return self._stream

    def _receive(self, plan: BucketPlan, version: int) -> Generator[tuple[str, Tensor], None, None]:
        got = torch.empty(2, dtype=torch.int64)
        self.broadcast(got).wait()
        check_header(*got.tolist(), plan=plan, version=version)

        def receive(bucket: Bucket) -> tuple[Work, Tensor]:
            flat = new_memory(bucket)
            return self.broadcast(flat), flat

        coming = [receive(plan.buckets[0])]
        try:
            for number, bucket in enumerate(plan.buckets):
                work, flat = coming.pop()
                work.wait()
                if number + 1 < len(plan.buckets):
                    coming.append(receive(plan.buckets[number + 1]))
                yield from unpack(bucket, flat)
        finally:
            coming.clear()  # an unfinished receive would keep the connection open after a failure

    def close(self) -> None:
        """Drop the connections; peers that wait for this rank get an error at once."""
        if self._stream is not None:
            self._stream.close()  # what it still receives would keep the connections, as long as an error refers to it
        for end in (self.shared, self._receiver, self._listener):
            if end is not None:
                end.close()
        self.shared = self._receiver = self._listener = None
        if self._group is not None:
            self._group.abort()
        self._group = None
        self._store = None


def _listen() -> tuple[socket.socket | None, str]:
    try:
        return listen()
    except (OSError, AttributeError) as error:  # AttributeError: Linux has memfd_create, other systems have not
        log.warning("weights go over gloo: this machine has no shared memory for them (%s)", error)
        return None, ""


def _named(address: GroupAddress, rank: int, what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (RuntimeError, DistError) as error:
        raise RuntimeError(
            f"weight group generation {address.generation}: rank {rank} of {address.world_size} could not {what} at "
            f"{address.master_address}:{address.master_port} within {address.timeout_s:g} s: {error}"
        ) from error
