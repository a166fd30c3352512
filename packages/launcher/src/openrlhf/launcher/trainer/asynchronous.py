"""The asynchronous pipeline: sampling goes on while the trainer trains, with a bound on how stale samples may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import Context
from dataclasses import replace

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.samples import EvalRequest, Group
from openrlhf.launcher.trainer.model_rewards import RewardStream
from openrlhf.launcher.trainer.pipeline import Pipeline
from openrlhf.launcher.trainer.protocols import PromptSource, Rollout
from openrlhf.launcher.trainer.untrained import Collected, Untrained
from openrlhf.rollout.groups import Pacing


class Gate:
    """Groups and weight pushes take turns: a push waits for running groups, no group starts meanwhile."""

    def __init__(self) -> None:
        self._running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Surrounds a group."""
        while not self._open.is_set():
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def pushing(self) -> AsyncIterator[None]:
        """Surrounds a push."""
        self._open.clear()
        await self._idle.wait()
        try:
            yield
        finally:
            self._open.set()


class AsyncPipeline(Pipeline):
    """A task samples rollout batches into a bounded queue while the trainer trains.

    Staleness is bounded by `Pacing`. Without --train.partial_rollout_enable a weight push lets running groups finish;
    with it they run on and the engines pause by themselves.
    """

    def __init__(
        self, config: TrainPPOConfig, rollout: Rollout, prompts: PromptSource, rewards: RewardStream | None = None
    ) -> None:
        train = config.train
        bound = train.async_queue_size if train.max_staleness is None else train.max_staleness
        self._pace = Pacing(config.rollout.batch_size, bound)
        super().__init__(config, rollout, prompts, rewards, pacing=self._pace)
        self._gate = None if train.partial_rollout_enable else Gate()
        self._filled = asyncio.Semaphore(0)
        self._slots = asyncio.Semaphore(train.async_queue_size)
        self._task: asyncio.Task[None] | None = None

    def resume(self, episode: int, step: int, untrained: Untrained) -> None:
        """Raises ValueError when the saved samples cannot be trained on before they are older than allowed."""
        pace, batches = self._pace, len(untrained.batches)
        pace.trained, pace.closed = step, step + batches
        deadlines = untrained.deadlines or [pace.deadline] * len(untrained.groups)
        if batches > pace.max_staleness + 1 or not pace.fits(min(deadline, pace.deadline) for deadline in deadlines):
            raise ValueError(
                f"the checkpoint holds {batches} rollout batches and {len(deadlines)} groups that were sampled ahead, "
                f"too many for --train.max_staleness {pace.max_staleness}: resume with the value of then"
            )
        self._filled = asyncio.Semaphore(batches)
        self._slots = asyncio.Semaphore(max(self._config.train.async_queue_size - batches, 0))
        super().resume(episode, step, replace(untrained, deadlines=deadlines))

    async def next(self) -> Collected | None:
        if self._task is None:
            outside = Context()  # sampling is no part of the step that starts it
            self._task = asyncio.create_task(self._generate(), name="sampling", context=outside)
        await self._filled.acquire()
        self._slots.release()
        return self._taken()

    def pushing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._gate is None else self._gate.pushing()

    def queue(self) -> dict[str, float]:
        return super().queue() | {"rollout/waiting_batches": float(len(self._ready))}

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await super().close()

    async def _run_group(self, item: PromptItem, evaluation: EvalRequest | None = None) -> Group:
        async with nullcontext() if self._gate is None else self._gate.sampling():
            group = await self._rollout.run_group(item, evaluation=evaluation)
        return await self._scored(group)

    async def _generate(self) -> None:
        """Fill the queue until the prompts are used up; an error is handed on in its place, whatever it is."""
        batch: Collected | None
        try:
            while True:
                await self._slots.acquire()
                batch = await self._sample()
                self._put(batch)
                if batch is None:
                    return
        except asyncio.CancelledError:
            self._put(RuntimeError("sampling was cancelled"))  # nobody waits for it where the run is over
            raise
        except Exception as error:
            self._put(error)

    def _put(self, item: Collected | BaseException | None) -> None:
        self._ready.append(item)
        self._filled.release()
