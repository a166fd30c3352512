"""Which of many has the least to do, without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Generic, TypeVar

K = TypeVar("K")

STALE = 4
"""Entries of the heap for each key, beyond which it is made anew."""


class Loads(Generic[K]):
    """The loads of keys; a change and a question cost the logarithm of their number."""

    def __init__(self, keys: Iterable[K]) -> None:
        """All loads are 0. keys: of equal loads the one that comes first here is the least."""
        self._places = {key: place for place, key in enumerate(keys)}
        self._loads = dict.fromkeys(self._places, 0)
        self._heap: list[tuple[int, int, K]] = []
        self._fill()

    def add(self, key: K, amount: int) -> None:
        """Change a load; nothing for a key that was dropped."""
        if key in self._loads:
            self._loads[key] += amount
            heapq.heappush(self._heap, (self._loads[key], self._places[key], key))
            if len(self._heap) > STALE * len(self._loads) + STALE:
                self._fill()

    def drop(self, key: K) -> None:
        """It is never the least again."""
        self._loads.pop(key, None)

    def least(self) -> K | None:
        """The key with the least load; None where all were dropped."""
        while self._heap and self._loads.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _fill(self) -> None:
        self._heap = [(load, self._places[key], key) for key, load in self._loads.items()]
        heapq.heapify(self._heap)
