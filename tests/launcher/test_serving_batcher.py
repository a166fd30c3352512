from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from openrlhf.launcher.serving.batcher import DynamicBatcher, OverloadedError


class Doubler:
    """Doubles numbers, notes its batches, fails on negative ones."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.sizes: list[int] = []

    def __call__(self, items: Sequence[int]) -> list[int]:
        time.sleep(self.seconds)
        self.sizes.append(len(items))
        if any(i < 0 for i in items):
            raise ValueError("negative")
        return [2 * i for i in items]


def run(function: Doubler, work: Callable[[DynamicBatcher[int, int]], Awaitable[Any]], **limits: int) -> Any:
    async def main() -> Any:
        batcher = DynamicBatcher(function, **{"max_items": 8, "max_pending": 1000, **limits})
        try:
            return await work(batcher)
        finally:
            await batcher.close()

    return asyncio.run(main())


def test_results_go_to_who_asked() -> None:
    function = Doubler(0.001)

    async def work(batcher: DynamicBatcher[int, int]) -> list[list[int]]:
        return await asyncio.gather(*(batcher.submit([i, i + 1, i + 2][: i % 3 + 1]) for i in range(100)))

    results = run(function, work)
    assert results == [[2 * i, 2 * i + 2, 2 * i + 4][: i % 3 + 1] for i in range(100)]
    assert max(function.sizes) == 8
    assert len(function.sizes) < 40


def test_what_waits_becomes_one_batch() -> None:
    together, alone = Doubler(0.005), Doubler()

    async def at_once(batcher: DynamicBatcher[int, int]) -> None:
        await asyncio.gather(*(batcher.submit([i]) for i in range(64)))

    async def one_by_one(batcher: DynamicBatcher[int, int]) -> None:
        for i in range(64):
            await batcher.submit([i])

    run(together, at_once, max_items=32)
    run(alone, one_by_one)
    assert together.sizes == [32, 32]
    assert alone.sizes == [1] * 64


def test_a_large_request_stays_whole() -> None:
    function = Doubler()
    assert run(function, lambda b: b.submit(list(range(20)))) == [2 * i for i in range(20)]
    assert function.sizes == [20]


def test_only_the_guilty_request_fails() -> None:
    async def work(batcher: DynamicBatcher[int, int]) -> list[Any]:
        return await asyncio.gather(*(batcher.submit([i]) for i in (0, 1, -1, 2)), return_exceptions=True)

    results = run(Doubler(0.01), work)
    assert [r for r in results if not isinstance(r, Exception)] == [[0], [2], [4]]
    assert isinstance(results[2], ValueError)


def test_too_much_waiting_is_refused() -> None:
    async def work(batcher: DynamicBatcher[int, int]) -> list[Any]:
        return await asyncio.gather(*(batcher.submit([1, 2, 3]) for _ in range(4)), return_exceptions=True)

    results = run(Doubler(0.01), work, max_pending=7)
    assert [isinstance(r, OverloadedError) for r in results] == [False, False, True, True]


def test_a_client_that_left_costs_nothing() -> None:
    function = Doubler(0.02)

    async def work(batcher: DynamicBatcher[int, int]) -> list[int]:
        first = asyncio.create_task(batcher.submit([1]))
        await asyncio.sleep(0.005)
        gone = asyncio.create_task(batcher.submit([2]))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert batcher.pending == 1
        return await first + await batcher.submit([3])

    assert run(function, work) == [2, 6]
    assert function.sizes == [1, 1]


def test_close_ends_waiting_requests() -> None:
    async def main() -> None:
        batcher = DynamicBatcher(Doubler(0.01), max_items=1, max_pending=10)
        tasks = [asyncio.create_task(batcher.submit([i])) for i in range(3)]
        await asyncio.sleep(0.002)
        await batcher.close()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
