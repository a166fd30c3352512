"""From prompts to one rollout batch of finished groups: the trainer's use of the rollout package's `GroupRunner`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.agents.types import PromptItem
from openrlhf.core.config import GROUP_ESTIMATORS
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.trainer.protocols import EvalRequest, Group, Rollout
from openrlhf.rollout.groups import GroupRules, GroupRunner, GroupStats, RolloutBatch, score_histogram

log = logging.getLogger(__name__)


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


def group_rules(config: TrainPPOConfig) -> GroupRules:
    """Which groups make a rollout batch."""
    algo = config.algo
    return GroupRules(
        batch_size=config.rollout.batch_size,
        score_range=algo.dynamic_filtering_range if algo.dynamic_filtering_enable else None,
        min_survivors=2 if algo.advantage.estimator in GROUP_ESTIMATORS else 1,
        max_failed_fraction=config.rollout.max_failed_fraction,
    )


class Collector:
    """Draws prompts until a rollout batch is full, episode by episode."""

    def __init__(self, config: TrainPPOConfig, rollout: Rollout, prompts: PromptSource) -> None:
        self._config = config
        self._rollout = rollout
        self._prompts = prompts
        self._runner: GroupRunner[PromptItem, Group] | None = None
        self._seen = GroupStats()

    def start_episode(self, episode: int) -> None:
        """Begin an episode at its first prompt."""
        self._prompts.start_episode(episode)
        self._runner = None

    async def next_batch(self) -> Collected | None:
        """The next rollout batch; None when the episode's prompts are used up.

        Raises RolloutFailedError when too many samples failed, with the first failure's traceback.
        """
        if self._runner is None:
            self._runner = GroupRunner(self._items(), self._rollout.run_group, group_rules(self._config))
        batch = await self._runner.next_batch()
        self._count(batch.stats)
        if not batch.groups:
            self._explain_nothing(batch)
            return None
        metrics = {"rollout/dropped_groups": float(batch.stats.dropped)}
        if self._config.algo.dynamic_filtering_enable:
            metrics["train/dynamic_filtering_pass_rate"] = 100.0 * batch.stats.pass_rate
        return Collected(groups=batch.groups, metrics=metrics)

    async def run_all(self, items: Sequence[PromptItem], evaluation: EvalRequest) -> list[Group]:
        """Every prompt of an evaluation, in order."""
        return list(await asyncio.gather(*(self._rollout.run_group(i, evaluation=evaluation) for i in items)))

    def describe(self) -> str:
        """What became of all samples so far, for the message of a run that trained on nothing."""
        seen = self._seen
        return (
            f"{seen.samples} samples, {seen.failed_samples} failed; groups: {seen.accepted} accepted, {seen.rejected} "
            f"filtered out, {seen.dropped} dropped; group mean scores:\n{score_histogram(seen.mean_scores)}"
        )

    def _items(self) -> Iterator[PromptItem]:
        while items := self._prompts.next(1):
            yield from items

    def _count(self, stats: GroupStats) -> None:
        seen = self._seen
        for name in ("accepted", "rejected", "dropped", "samples", "failed_samples"):
            setattr(seen, name, getattr(seen, name) + getattr(stats, name))
        seen.mean_scores.extend(stats.mean_scores)

    def _explain_nothing(self, batch: RolloutBatch[Group]) -> None:
        stats = batch.stats
        if stats.rejected or stats.dropped:
            log.warning(
                "the episode ended without another rollout batch: %d groups were outside "
                "--algo.dynamic_filtering_range %s, %d had too few samples left; group mean scores:\n%s",
                stats.rejected,
                self._config.algo.dynamic_filtering_range,
                stats.dropped,
                score_histogram(stats.mean_scores),
            )
