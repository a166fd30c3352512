"""How sampling and training share time: one after the other, or side by side with a bound on staleness.

Both pipelines look alike to the trainer: it takes rollout batches, announces weight pushes and finished steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.trainer.collect import Collected, Collector, PromptSource, Untrained
from openrlhf.launcher.trainer.model_rewards import RewardStream, scored
from openrlhf.launcher.trainer.protocols import EvalRequest, Group, Rollout, SampleInfo
from openrlhf.rollout.pacing import Pacing


class Pipeline(Protocol):
    """Where the trainer's rollout batches come from."""

    @property
    def episode(self) -> int:
        """The episode that prompts are drawn from."""
        ...

    def start(self) -> None:
        """Begin a fresh run."""
        ...

    def resume(self, episode: int, step: int, untrained: Untrained) -> None:
        """Go on after `step` rollout batches."""
        ...

    async def next(self) -> Collected | None:
        """The next rollout batch; None when all prompts of all episodes are used up."""
        ...

    def pushing(self) -> AbstractAsyncContextManager[None]:
        """Surrounds a weight push: engines are idle inside, unless they pause by themselves."""
        ...

    def limit(self, last: int | None) -> None:
        """Sample nothing for rollout batches after number `last`, counted from 0 over the whole run; None: no end."""
        ...

    def trained(self, last: int | None) -> None:
        """A step is over and the engines have its weights. last: as in `limit`."""
        ...

    async def evaluate(self, items: Sequence[PromptItem], request: EvalRequest) -> list[Group]:
        """Every prompt of an evaluation, in order."""
        ...

    def fail(self, samples: Sequence[SampleInfo]) -> dict[str, float]:
        """Count samples of the last batch that a reward model failed. Returns their metrics.

        Raises RolloutFailedError when with them too many samples failed.
        """
        ...

    def untrained(self) -> Untrained:
        """What a checkpoint must hold of the samples, at this moment."""
        ...

    def describe(self) -> str:
        """What became of all samples so far."""
        ...

    async def close(self) -> None:
        """End sampling."""
        ...


def make_pipeline(
    config: TrainPPOConfig, rollout: Rollout, prompts: PromptSource, rewards: RewardStream | None = None
) -> Pipeline:
    """The pipeline that the configuration asks for. rewards: scores groups as they finish."""
    kind = AsyncPipeline if config.train.async_enable else SyncPipeline
    return kind(config, rollout, prompts, rewards)


class SyncPipeline:
    """A rollout batch is sampled when the trainer asks for it. With --vllm.enable_sleep engines sleep afterwards."""

    def __init__(
        self, config: TrainPPOConfig, rollout: Rollout, prompts: PromptSource, rewards: RewardStream | None = None
    ) -> None:
        self._rollout = rollout
        self._rewards = rewards
        self._by_model = config.has_reward_model
        self._sleeps = config.vllm.enable_sleep
        self._ready: deque[Collected] = deque()
        self._collector = Collector(config, self._run_group, prompts)

    @property
    def episode(self) -> int:
        return self._collector.episode

    def start(self) -> None:
        self._collector.start()

    def resume(self, episode: int, step: int, untrained: Untrained) -> None:
        self._ready.extend(untrained.batches)
        self._collector.resume(episode, untrained)

    async def next(self) -> Collected | None:
        async with self._awake():
            return self._ready.popleft() if self._ready else await self._collector.next_batch()

    def pushing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def limit(self, last: int | None) -> None:
        pass

    def trained(self, last: int | None) -> None:
        pass

    async def evaluate(self, items: Sequence[PromptItem], request: EvalRequest) -> list[Group]:
        async with self._awake():
            return list(await asyncio.gather(*(self._run_group(i, request) for i in items)))

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """The engines have the devices inside, the models afterwards."""
        if self._sleeps:
            await self._rollout.wake()
        yield
        if self._sleeps:
            await self._rollout.sleep()

    async def _run_group(self, item: PromptItem, evaluation: EvalRequest | None = None) -> Group:
        group = await self._rollout.run_group(item, evaluation=evaluation)
        return await scored(group, self._rewards, by_model=self._by_model)

    def fail(self, samples: Sequence[SampleInfo]) -> dict[str, float]:
        return self._collector.fail(samples)

    def untrained(self) -> Untrained:
        rest = self._collector.untrained()
        return Untrained(batches=list(self._ready), groups=rest.groups, prompts=rest.prompts)

    def describe(self) -> str:
        return self._collector.describe()

    async def close(self) -> None:
        await self._collector.stop()


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


class AsyncPipeline:
    """A task samples rollout batches into a bounded queue while the trainer trains.

    Staleness is bounded by pacing (`openrlhf.rollout.pacing`). Without --train.partial_rollout_enable a weight push
    lets running groups finish; with it they run on and the engines pause by themselves.
    """

    def __init__(
        self, config: TrainPPOConfig, rollout: Rollout, prompts: PromptSource, rewards: RewardStream | None = None
    ) -> None:
        train = config.train
        self._rollout = rollout
        self._rewards = rewards
        self._by_model = config.has_reward_model
        self._gate = None if train.partial_rollout_enable else Gate()
        bound = train.async_queue_size if train.max_staleness is None else train.max_staleness
        self._pacing = Pacing(config.rollout.batch_size, bound)
        self._collector = Collector(config, self._run_group, prompts, pacing=self._pacing)
        self._ready: deque[Collected | BaseException | None] = deque()
        self._filled = asyncio.Semaphore(0)
        self._slots = asyncio.Semaphore(train.async_queue_size)
        self._queue_size = train.async_queue_size
        self._task: asyncio.Task[None] | None = None

    @property
    def episode(self) -> int:
        return self._collector.episode

    def start(self) -> None:
        self._collector.start()

    def resume(self, episode: int, step: int, untrained: Untrained) -> None:
        """Raises ValueError when the saved samples cannot be trained on before they are older than allowed."""
        batches = len(untrained.batches)
        self._pacing.trained, self._pacing.closed = step, step + batches
        deadlines = untrained.deadlines or [self._pacing.deadline] * len(untrained.groups)
        if batches > self._pacing.max_staleness + 1 or not self._pacing.fits(
            min(deadline, self._pacing.deadline) for deadline in deadlines
        ):
            raise ValueError(
                f"the checkpoint holds {batches} rollout batches and {len(deadlines)} groups that were sampled ahead, "
                f"too many for --train.max_staleness {self._pacing.max_staleness}: resume with the value of then"
            )
        self._ready.extend(untrained.batches)
        self._filled = asyncio.Semaphore(batches)
        self._slots = asyncio.Semaphore(max(self._queue_size - batches, 0))
        self._collector.resume(
            episode, Untrained(groups=untrained.groups, deadlines=deadlines, prompts=untrained.prompts)
        )

    async def next(self) -> Collected | None:
        if self._task is None:
            self._task = asyncio.create_task(self._generate(), name="sampling")
        await self._filled.acquire()
        item = self._ready.popleft()
        self._slots.release()
        if isinstance(item, BaseException):
            raise item
        return item

    def pushing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._gate is None else self._gate.pushing()

    def limit(self, last: int | None) -> None:
        self._pacing.limit(last)

    def trained(self, last: int | None) -> None:
        self._pacing.advance(last=last)

    async def evaluate(self, items: Sequence[PromptItem], request: EvalRequest) -> list[Group]:
        return list(await asyncio.gather(*(self._run_group(i, request) for i in items)))

    def fail(self, samples: Sequence[SampleInfo]) -> dict[str, float]:
        return self._collector.fail(samples)

    def untrained(self) -> Untrained:
        rest = self._collector.untrained()
        batches = [item for item in self._ready if isinstance(item, Collected)]
        return Untrained(batches=batches, groups=rest.groups, deadlines=rest.deadlines, prompts=rest.prompts)

    def describe(self) -> str:
        return self._collector.describe()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._collector.stop()

    async def _run_group(self, item: PromptItem, evaluation: EvalRequest | None = None) -> Group:
        async with nullcontext() if self._gate is None else self._gate.sampling():
            group = await self._rollout.run_group(item, evaluation=evaluation)
        return await scored(group, self._rewards, by_model=self._by_model)

    async def _generate(self) -> None:
        """Fill the queue until the prompts are used up; an error is handed on in its place, whatever it is."""
        batch: Collected | None
        try:
            while True:
                await self._slots.acquire()
                batch = await self._collector.next_batch()
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
