"""A gloo process group between the trainer's rank 0 and every engine worker, beside any default group.

It is built from a store and a backend object alone, so it touches none of torch.distributed's global state: the
trainer and the engines keep their own default groups. Every group has a generation; after a failed push a new group
of the next generation is made, since survivors of a broken group cannot be trusted to be in step.
"""

from __future__ import annotations

import datetime
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

from openrlhf.rollout.weights.wire import Bucket, BucketPlan, torch_dtype, unpack

GROUP_TIMEOUT_S = 15.0
"""Longest wait for a peer, in a rendezvous or in one message. Survivors of a dead peer block that long."""


@dataclass(frozen=True, kw_only=True)
class GroupAddress:
    """Where a group meets. The sender is rank 0; engine workers take the ranks from their offset on."""

    master_address: str
    master_port: int
    world_size: int
    generation: int
    timeout_s: float = GROUP_TIMEOUT_S

    def for_engine(self, rank_offset: int) -> dict[str, Any]:
        """The init info of an engine whose first worker has this rank."""
        return {**asdict(self), "rank_offset": rank_offset}


class WeightGroup:
    """One rank's end of a group. Make it with `host` (rank 0) or `join`."""

    def __init__(self, address: GroupAddress, rank: int, store: Store) -> None:
        self.address = address
        self.rank = rank
        self._store: Store | None = store
        self._stream: Generator[tuple[str, Tensor], None, None] | None = None
        self._group: Any = None  # a ProcessGroupGloo; its methods are not in torch's type stubs

    @classmethod
    def host(cls, *, master_address: str, world_size: int, generation: int, timeout_s: float) -> WeightGroup:
        """Open the meeting point on a free port and return without waiting for anybody."""
        store = TCPStore(
            master_address,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        address = GroupAddress(
            master_address=master_address,
            master_port=store.port,
            world_size=world_size,
            generation=generation,
            timeout_s=timeout_s,
        )
        return cls(address, 0, store)

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
        assert self._store is not None, "the group is closed"
        store = PrefixStore(f"openrlhf-weights-{self.address.generation}", self._store)
        timeout = datetime.timedelta(seconds=self.address.timeout_s)
        self._group = _named(
            self.address,
            self.rank,
            "meet the other ranks",
            lambda: ProcessGroupGloo(store, self.rank, self.address.world_size, timeout),
        )

    def broadcast(self, tensor: Tensor) -> Work:
        """Start sending (rank 0) or receiving a contiguous CPU tensor; wait on the returned handle."""
        assert self._group is not None, "connect the group first"
        return self._group.broadcast(tensor, 0)

    def receive(self, plan: BucketPlan, version: int) -> Iterator[tuple[str, Tensor]]:
        """All tensors of a push as an engine worker gets it; the next bucket is received while one is used.

        Every bucket gets memory of its own: vLLM keeps views of tensors until their layer is complete. Raises
        RuntimeError when the sender is gone, or follows another plan or version than this engine was told.
        """
        self._stream = self._receive(plan, version)
        return self._stream

    def _receive(self, plan: BucketPlan, version: int) -> Generator[tuple[str, Tensor], None, None]:
        got = torch.empty(2, dtype=torch.int64)
        self.broadcast(got).wait()
        if got.tolist() != [version, plan.digest]:
            raise RuntimeError(
                f"the trainer pushes version {int(got[0])} (plan {int(got[1])}), this engine was told version "
                f"{version} (plan {plan.digest})"
            )

        def receive(bucket: Bucket) -> tuple[Work, Tensor]:
            flat = torch.empty(bucket.numel, dtype=torch_dtype(bucket.dtype))
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
        if self._group is not None:
            self._group.abort()
        self._group = None
        self._store = None


def _named(address: GroupAddress, rank: int, what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (RuntimeError, DistError) as error:
        raise RuntimeError(
            f"weight group generation {address.generation}: rank {rank} of {address.world_size} could not {what} at "
            f"{address.master_address}:{address.master_port} within {address.timeout_s:g} s: {error}"
        ) from error
