"""Rollout batches for the trainer: from prompts, over groups of samples (`openrlhf.rollout.groups`), to full batches.

`SyncPipeline` samples when the trainer asks; `asynchronous.AsyncPipeline` samples while it trains. Both look alike to
the trainer: it takes batches, announces weight pushes and finished steps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.samples import EvalRequest, Group, SampleInfo, fail_misplaced, fail_unscored
from openrlhf.launcher.trainer.model_rewards import RewardStream
from openrlhf.launcher.trainer.protocols import PromptSource, Rollout
from openrlhf.launcher.trainer.sources import failures_by_source, named
from openrlhf.launcher.trainer.untrained import Collected, Untrained
from openrlhf.rollout import episodes
from openrlhf.rollout.failure_share import FailureShare, RolloutFailedError
from openrlhf.rollout.groups import GroupRules, GroupRunner, GroupStats, Pacing, RolloutBatch, score_histogram

log = logging.getLogger(__name__)

FAILURE_KINDS = ("agent", "reward", "engine", "timeout")
"""Borders that a sample can fail at; each has its count among the metrics of every step."""


def group_rules(config: TrainPPOConfig) -> GroupRules:
    """Which groups make a rollout batch: in prompt order, or by arrival in the asynchronous pipeline."""
    algo, rollout = config.algo, config.rollout
    in_flight = rollout.vllm_generate_batch_size
    if config.train.async_enable and in_flight is None:
        in_flight = rollout.batch_size
    return GroupRules(
        batch_size=rollout.batch_size,
        in_flight=in_flight,
        by_arrival=config.train.async_enable,
        score_range=algo.dynamic_filtering_range if algo.dynamic_filtering_enable else None,
        min_survivors=algo.advantage.row.min_samples,
        max_failed_fraction=rollout.max_failed_fraction,
    )


def failure_metrics(failures: Mapping[str, int]) -> dict[str, float]:
    """The number of failed samples, in all and by kind."""
    counts = dict.fromkeys(FAILURE_KINDS, 0) | dict(failures)
    by_kind = {f"rollout/failed_samples_{kind}": float(count) for kind, count in counts.items()}
    return {"rollout/failed_samples": float(sum(counts.values()))} | by_kind


def late_failures(sampled: Sequence[Group], rewarded: Sequence[Group]) -> list[tuple[PromptItem, SampleInfo]]:
    """A failed sample of every episode that a reward model failed after its batch was complete, with its prompt."""
    before = (episode for group in sampled for episode in episodes.by_episode(group.samples))
    after = ((group.prompt, episode) for group in rewarded for episode in episodes.by_episode(group.samples))
    return [
        (item, failed[0])
        for old, (item, new) in zip(before, after, strict=True)
        if (failed := episodes.failures(new)) and not episodes.failures(old)
    ]


class Idleness:
    """How long nothing was under way. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy = 0
        self._seconds = 0.0
        self._changed = self._asked = clock()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Surrounds work; several pieces of it may overlap."""
        self._count()
        self._busy += 1
        try:
            yield
        finally:
            self._count()
            self._busy -= 1

    def share(self) -> float:
        """The idle share of the time since the last call."""
        self._count()
        seconds, self._seconds = self._seconds, 0.0
        before, self._asked = self._asked, self._changed
        return seconds / (self._changed - before) if self._changed > before else 0.0

    def _count(self) -> None:
        now = self._clock()
        self._seconds += 0.0 if self._busy else now - self._changed
        self._changed = now


class Pipeline(ABC):
    """Draws prompts until a rollout batch is full, episode by episode. How sampling shares time is the subclass'.

    episode: the one that prompts are drawn from.
    """

    def __init__(
        self,
        config: TrainPPOConfig,
        rollout: Rollout,
        prompts: PromptSource,
        rewards: RewardStream | None = None,
        *,
        pacing: Pacing | None = None,
    ) -> None:
        """rewards: scores groups as they finish. pacing: how far ahead of training sampling may go."""
        self.episode = 0
        self._config = config
        self._rollout = rollout
        self._prompts = prompts
        self._rewards = rewards
        self._pacing = pacing
        self._ready: deque[Collected | BaseException | None] = deque()  # what the trainer has not taken yet
        self._runner: GroupRunner[PromptItem, Group] | None = None
        self._idle = Idleness()
        self._seen = GroupStats()
        self._failures: Counter[str] = Counter()  # since the last batch
        self._failed_prompts: list[tuple[PromptItem, int]] = []
        self._named = False  # whether data sources or environments are told apart
        self._share = FailureShare(config.rollout.max_failed_fraction, config.rollout.batch_size)

    @abstractmethod
    async def next(self) -> Collected | None:
        """The next rollout batch; None when all prompts of all episodes are used up.

        Raises RolloutFailedError when too many samples failed, with the first failure's traceback.
        """

    async def evaluate(self, items: Sequence[PromptItem], request: EvalRequest) -> list[Group]:
        """Every prompt of an evaluation, in order."""
        return list(await asyncio.gather(*(self._run_group(item, request) for item in items)))

    def pushing(self) -> AbstractAsyncContextManager[None]:
        """Surrounds a weight push: engines are idle inside, unless they pause by themselves."""
        return nullcontext()

    def limit(self, last: int | None) -> None:
        """Sample nothing for rollout batches after number `last`, counted from 0 over the whole run; None: no end."""
        if self._pacing is not None:
            self._pacing.limit(last)

    def trained(self, last: int | None) -> None:
        """A step is over and the engines have its weights. last: as in `limit`."""
        if self._pacing is not None:
            self._pacing.advance(last=last)

    def start(self) -> None:
        """Begin the run at the first prompt."""
        self._prompts.start_episode(0)

    def resume(self, episode: int, step: int, untrained: Untrained) -> None:
        """Go on after `step` rollout batches in this episode, where the prompt source already stands."""
        rollout = self._config.rollout
        self.episode = episode
        self._ready.extend(untrained.batches)
        self._share = FailureShare(rollout.max_failed_fraction, rollout.batch_size, resumed=True)
        self._runner = self._new_runner(untrained)

    def fail(self, failures: Sequence[tuple[PromptItem, SampleInfo]]) -> dict[str, float]:
        """Count episodes of the last batch that a reward model failed, a sample of each. Returns their metrics.

        Raises RolloutFailedError when with them too many samples failed.
        """
        self._share.fail(sample for _, sample in failures)
        kinds = Counter(sample.failure_kind for _, sample in failures)
        by_source = failures_by_source((item, 1) for item, _ in failures) if self._named else {}
        return failure_metrics(kinds) | by_source

    def untrained(self) -> Untrained:
        """What a checkpoint must hold of the samples, at this moment."""
        runner, batches = self._runner, [item for item in self._ready if isinstance(item, Collected)]
        if runner is None:
            return Untrained(batches=batches)
        return Untrained(
            batches=batches,
            groups=runner.buffer,
            deadlines=runner.buffer_deadlines,
            prompts=runner.running_prompts,
        )

    def queue(self) -> dict[str, float]:
        """The share of the time since the last call in which nothing was sampled, and how the prompts stand."""
        return {"perf/waiting_for_trainer": self._idle.share()} | self._prompts.metrics()

    def describe(self) -> str:
        """What became of all samples so far, for the message of a run that trained on nothing."""
        seen = self._seen
        return (
            f"{seen.samples} samples, {seen.failed_samples} failed; groups: {seen.accepted} accepted, {seen.rejected} "
            f"filtered out, {seen.dropped} dropped; group mean scores:\n{score_histogram(seen.mean_scores)}"
        )

    async def close(self) -> None:
        """End sampling: cancel the groups under way."""
        if self._runner is not None:
            await self._runner.stop()

    def _taken(self) -> Collected | None:
        """The first batch that is ready. Raises the error that came in its place."""
        item = self._ready.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    async def _sample(self) -> Collected | None:
        """Run groups until a batch is full, in a further episode where this one ends before."""
        while True:
            if self._runner is None:
                self._runner = self._new_runner(Untrained())
            try:
                batch = await self._runner.next_batch()
            except RolloutFailedError as error:
                raise RolloutFailedError(f"{error}{self._by_environment()}") from error
            self._prompts.settle()
            self._count(batch.stats)
            if batch.groups:
                return Collected(groups=batch.groups, metrics=self._metrics(batch))
            self._explain_nothing(batch)
            if self.episode + 1 >= self._config.train.num_episodes:
                return None
            self.episode += 1
            self._prompts.start_episode(self.episode)
            self._runner = None

    async def _run_group(self, item: PromptItem, evaluation: EvalRequest | None = None) -> Group:
        return await self._scored(await self._rollout.run_group(item, evaluation=evaluation))

    async def _busy_group(self, item: PromptItem) -> Group:
        with self._idle.busy():
            group = await self._run_group(item)
        if self._config.algo.turn_rewards != "off":
            group = fail_misplaced(group)
        self._prompts.seen(item, group.samples)
        return group

    async def _scored(self, group: Group) -> Group:
        """With rewards of the stream. Where a reward model scores later, what has no reward yet is left as it is."""
        if self._rewards is not None:
            return await self._rewards.score(group)
        return group if self._config.has_reward_model else fail_unscored(group)

    def _by_environment(self) -> str:
        """Which environments failed, for the end of a run."""
        shares = self._prompts.failing().items()
        return "".join(f"\nenvironment {name!r}: {share:.0%} of its last episodes failed" for name, share in shares)

    def _new_runner(self, untrained: Untrained) -> GroupRunner[PromptItem, Group]:
        return GroupRunner(
            itertools.chain(untrained.prompts, self._items()),
            self._busy_group,
            group_rules(self._config),
            buffer=untrained.groups,
            pacing=self._pacing,
            deadlines=untrained.deadlines if self._pacing else (),
            failures=self._share,
            judged=self._prompts.judged,
        )

    def _items(self) -> Iterator[PromptItem]:
        while items := self._prompts.next(1):
            yield from items

    def _metrics(self, batch: RolloutBatch[Group]) -> dict[str, float]:
        failures, self._failures = self._failures, Counter()
        prompts, self._failed_prompts = self._failed_prompts, []
        metrics = {"rollout/dropped_groups": float(batch.stats.dropped)} | failure_metrics(failures)
        self._named |= named(group.prompt for group in batch.groups) or named(item for item, _ in prompts)
        metrics |= failures_by_source(prompts) if self._named else {}
        if self._config.algo.dynamic_filtering_enable:
            metrics["train/dynamic_filtering_pass_rate"] = 100.0 * batch.stats.pass_rate
        return metrics

    def _count(self, stats: GroupStats) -> None:
        seen = self._seen
        for name in ("accepted", "rejected", "dropped", "samples", "failed_samples"):
            setattr(seen, name, getattr(seen, name) + getattr(stats, name))
        seen.mean_scores.extend(stats.mean_scores)
        self._failures.update(stats.failures)
        self._failed_prompts += stats.failed_prompts

    def _explain_nothing(self, batch: RolloutBatch[Group]) -> None:
        stats = batch.stats
        if stats.rejected or stats.dropped:
            log.warning(
                "the episode ended without another rollout batch: %d groups were outside "
                "--algo.dynamic_filtering_range %s, %d had too few samples left, %d samples failed; "
                "group mean scores:\n%s",
                stats.rejected,
                self._config.algo.dynamic_filtering_range,
                stats.dropped,
                stats.failed_samples,
                score_histogram(stats.mean_scores),
            )


class SyncPipeline(Pipeline):
    """A rollout batch is sampled when the trainer asks for it. With --vllm.enable_sleep engines sleep afterwards."""

    async def next(self) -> Collected | None:
        async with self._awake():
            return self._taken() if self._ready else await self._sample()

    async def evaluate(self, items: Sequence[PromptItem], request: EvalRequest) -> list[Group]:
        async with self._awake():
            return await super().evaluate(items, request)

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """The engines have the devices inside, the models afterwards."""
        if self._config.vllm.enable_sleep:
            await self._rollout.wake()
        yield
        if self._config.vllm.enable_sleep:
            await self._rollout.sleep()
