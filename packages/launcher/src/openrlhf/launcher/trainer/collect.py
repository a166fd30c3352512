"""From prompts to rollout batches of finished groups: the trainer's use of the rollout package's `GroupRunner`."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.trainer.protocols import Group, SampleInfo
from openrlhf.rollout.failure_share import FailureShare
from openrlhf.rollout.groups import GroupRules, GroupRunner, GroupStats, RolloutBatch, score_histogram
from openrlhf.rollout.pacing import Pacing

log = logging.getLogger(__name__)

FAILURE_KINDS = ("agent", "reward", "engine", "timeout")
"""Borders that a sample can fail at; each has its count among the metrics of every step."""

RunGroup = Callable[[PromptItem], Awaitable[Group]]


class PromptSource(Protocol):
    """Prompts of one episode after the other, in a seeded order."""

    def start_episode(self, episode: int) -> None: ...

    def next(self, n: int) -> list[PromptItem]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A rollout batch and what it took to get it."""

    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Untrained:
    """What was sampled or drawn but not trained on yet: part of a checkpoint, so that nothing is lost.

    batches: filled ones. groups: accepted ones that no batch has yet, with their deadlines. prompts: of the groups that
    were under way; they are rolled out again.
    """

    batches: list[Collected] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    deadlines: list[int] = field(default_factory=list)
    prompts: list[PromptItem] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.batches or self.groups or self.prompts)


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


def late_failures(sampled: Sequence[Group], rewarded: Sequence[Group]) -> list[SampleInfo]:
    """The samples that a reward model failed after their batch was complete."""
    pairs = ((s, r) for a, b in zip(sampled, rewarded, strict=True) for s, r in zip(a.samples, b.samples, strict=True))
    return [r for s, r in pairs if r.failed and not s.failed]


class Collector:
    """Draws prompts until a rollout batch is full, episode by episode. pacing: how far ahead of training it may go."""

    def __init__(
        self, config: TrainPPOConfig, run_group: RunGroup, prompts: PromptSource, *, pacing: Pacing | None = None
    ) -> None:
        self.episode = 0
        self._config = config
        self._run_group = run_group
        self._prompts = prompts
        self._pacing = pacing
        self._runner: GroupRunner[PromptItem, Group] | None = None
        self._seen = GroupStats()
        self._failures: Counter[str] = Counter()  # since the last batch
        self._share = FailureShare(config.rollout.max_failed_fraction, config.rollout.batch_size)

    def start(self) -> None:
        """Begin the run at the first prompt."""
        self._prompts.start_episode(0)

    def resume(self, episode: int, untrained: Untrained) -> None:
        """Go on in this episode, where the prompt source already stands."""
        rollout = self._config.rollout
        self.episode = episode
        self._share = FailureShare(rollout.max_failed_fraction, rollout.batch_size, resumed=True)
        self._runner = self._new_runner(untrained)

    async def next_batch(self) -> Collected | None:
        """The next rollout batch; None when the prompts of all episodes are used up.

        Raises RolloutFailedError when too many samples failed, with the first failure's traceback.
        """
        while True:
            if self._runner is None:
                self._runner = self._new_runner(Untrained())
            batch = await self._runner.next_batch()
            self._count(batch.stats)
            if batch.groups:
                return Collected(groups=batch.groups, metrics=self._metrics(batch))
            self._explain_nothing(batch)
            if self.episode + 1 >= self._config.train.num_episodes:
                return None
            self.episode += 1
            self._prompts.start_episode(self.episode)
            self._runner = None

    def fail(self, samples: Sequence[SampleInfo]) -> dict[str, float]:
        """Count samples that failed after their batch was complete. Returns their metrics.

        Raises RolloutFailedError when with them too many samples failed.
        """
        self._share.fail(samples)
        return failure_metrics(Counter(s.failure_kind for s in samples))

    def untrained(self) -> Untrained:
        """Groups without a batch, at this moment."""
        runner = self._runner
        if runner is None:
            return Untrained()
        return Untrained(groups=runner.buffer, deadlines=runner.buffer_deadlines, prompts=runner.running_prompts)

    async def stop(self) -> None:
        """Cancel the groups under way."""
        if self._runner is not None:
            await self._runner.stop()

    def describe(self) -> str:
        """What became of all samples so far, for the message of a run that trained on nothing."""
        seen = self._seen
        return (
            f"{seen.samples} samples, {seen.failed_samples} failed; groups: {seen.accepted} accepted, {seen.rejected} "
            f"filtered out, {seen.dropped} dropped; group mean scores:\n{score_histogram(seen.mean_scores)}"
        )

    def _new_runner(self, untrained: Untrained) -> GroupRunner[PromptItem, Group]:
        return GroupRunner(
            itertools.chain(untrained.prompts, self._items()),
            self._run_group,
            group_rules(self._config),
            buffer=untrained.groups,
            pacing=self._pacing,
            deadlines=untrained.deadlines if self._pacing else (),
            failures=self._share,
        )

    def _items(self) -> Iterator[PromptItem]:
        while items := self._prompts.next(1):
            yield from items

    def _metrics(self, batch: RolloutBatch[Group]) -> dict[str, float]:
        failures, self._failures = self._failures, Counter()
        metrics = {"rollout/dropped_groups": float(batch.stats.dropped)} | failure_metrics(failures)
        if self._config.algo.dynamic_filtering_enable:
            metrics["train/dynamic_filtering_pass_rate"] = 100.0 * batch.stats.pass_rate
        return metrics

    def _count(self, stats: GroupStats) -> None:
        seen = self._seen
        for name in ("accepted", "rejected", "dropped", "samples", "failed_samples"):
            setattr(seen, name, getattr(seen, name) + getattr(stats, name))
        seen.mean_scores.extend(stats.mean_scores)
        self._failures.update(stats.failures)

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
