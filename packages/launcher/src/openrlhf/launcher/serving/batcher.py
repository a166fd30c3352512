"""Dynamic batching: what arrives while a batch runs becomes the next batch. No request waits for a full batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class OverloadedError(RuntimeError):
    """More is waiting than the server takes."""


@dataclass
class _Job(Generic[T, R]):
    items: Sequence[T]
    future: asyncio.Future[list[R]]


class DynamicBatcher(Generic[T, R]):
    """Runs `function` on the items of several requests at once, in a thread of its own.

    function: items -> results, one per item, in order. max_items: requests are joined up to so many items; a larger
    request is run alone and whole. max_pending: items that may wait before OverloadedError.
    When a joined batch raises, its requests are run one by one, so that only the guilty one fails.
    """

    def __init__(self, function: Callable[[Sequence[T]], list[R]], *, max_items: int, max_pending: int) -> None:
        self._function = function
        self._max_items = max_items
        self._max_pending = max_pending
        self._jobs: deque[_Job[T, R]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batcher")
        self._loop: asyncio.Task[None] | None = None
        self.pending = 0
        self.batches = 0

    async def submit(self, items: Sequence[T]) -> list[R]:
        """The results for these items. Raises what `function` raises on them, and OverloadedError."""
        if self.pending + len(items) > self._max_pending and self.pending:
            raise OverloadedError(f"{self.pending} texts are waiting already")
        if self._loop is None:
            self._loop = asyncio.create_task(self._serve(), name="batcher")
        job = _Job[T, R](items, asyncio.get_running_loop().create_future())
        self.pending += len(items)
        self._jobs.append(job)
        self._arrived.set()
        try:
            return await job.future
        finally:
            self.pending -= len(items)

    async def close(self) -> None:
        """Stop; requests without an answer are cancelled."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        for job in self._jobs:
            job.future.cancel()
        self._thread.shutdown(wait=True)

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            jobs = self._take()
            if not self._jobs:
                self._arrived.clear()
            if jobs:
                await self._run(jobs)

    def _take(self) -> list[_Job[T, R]]:
        """The oldest requests that fit into one batch; those whose client has gone are dropped."""
        jobs: list[_Job[T, R]] = []
        count = 0
        while self._jobs and (not jobs or count + len(self._jobs[0].items) <= self._max_items):
            job = self._jobs.popleft()
            if not job.future.done():
                jobs.append(job)
                count += len(job.items)
        return jobs

    async def _run(self, jobs: list[_Job[T, R]]) -> None:
        items = [item for job in jobs for item in job.items]
        self.batches += 1
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._function, items)
            assert len(results) == len(items), "one result per item"
        except asyncio.CancelledError:
            for job in jobs:
                job.future.cancel()
            raise
        except Exception as error:  # handed to the one who asked
            if len(jobs) > 1:
                for job in jobs:
                    await self._run([job])
            elif not jobs[0].future.done():
                jobs[0].future.set_exception(error)
            return
        start = 0
        for job in jobs:
            end = start + len(job.items)
            if not job.future.done():
                job.future.set_result(results[start:end])
            start = end
