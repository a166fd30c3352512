"""Keeps sampling at most a number of rollout batches ahead of training, so that no token gets too old. Pure asyncio.

Batches are numbered in the order in which they are trained on; `trained` of them have reached the engines as new
weights. A group that starts now must be in batch `trained + max_staleness` at the latest: that is its deadline.
Groups start only while all of them fit into the batches up to their deadlines, and a batch closes only when those left
over still do. So the bound holds without throwing anything away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


class Pacing:
    """When groups may start and when a batch may close.

    batch_size: groups per batch. max_staleness: how many batches may be trained between the start of a group and its
    own batch (--train.max_staleness). trained, closed: batches that were trained on, and that were filled, so far.
    """

    def __init__(self, batch_size: int, max_staleness: int, *, trained: int = 0, closed: int | None = None) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.trained = trained
        self.closed = trained if closed is None else closed
        self.last: int | None = None
        self._advanced = asyncio.Event()

    @property
    def deadline(self) -> int:
        """Number of the last batch that a group that starts now may be in."""
        return self.trained + self.max_staleness

    def advance(self, *, last: int | None = None) -> None:
        """One more batch was trained on and its weights pushed. last: number of the last batch of the run, if known."""
        self.trained += 1
        self.limit(last)

    def limit(self, last: int | None) -> None:
        """Start nothing for batches after number `last`."""
        self.last = last
        self._advanced.set()
        self._advanced = asyncio.Event()

    def advanced(self) -> Coroutine[Any, Any, bool]:
        """A wait for the next `advance` or `limit` from now on, also when it is awaited later."""
        return self._advanced.wait()

    def close_batch(self) -> None:
        """A batch was filled."""
        self.closed += 1

    def may_start(self, outstanding: int) -> bool:
        """Whether one more group may start beside `outstanding` ones that run or wait for a batch."""
        end = self.deadline if self.last is None else min(self.deadline, self.last)
        return outstanding < (end - self.closed + 1) * self.batch_size

    def fits(self, deadlines: Iterable[int], *, first: int | None = None) -> bool:
        """Whether groups with these deadlines all fit into the batches from number `first` (the next one) on."""
        start = self.closed if first is None else first
        return all(
            number < (deadline - start + 1) * self.batch_size for number, deadline in enumerate(sorted(deadlines))
        )
