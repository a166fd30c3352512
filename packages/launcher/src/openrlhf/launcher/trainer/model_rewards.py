"""Rewards of an in-cluster reward model: group by group while others still generate, or for a whole batch at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.samples import Group, SampleInfo, SampleRef


class RewardModel(Protocol):
    """What gives samples their rewards inside the cluster: a `Learner`, or its reward ranks alone."""

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        """The raw reward of each sample, in order."""
        ...


async def add_rewards(learner: RewardModel, groups: Sequence[Group]) -> list[Group]:
    """The groups with the model's reward for every sample that did not fail and has none; one call for all of them.

    A sample whose reward is not finite fails, as it does with every other source of rewards.
    """
    refs = unscored_refs(groups)
    rewards = iter(await learner.score_rewards(refs) if refs else ())
    return [replace(g, samples=[_rewarded(s, next(rewards)) if s.unscored else s for s in g.samples]) for g in groups]


def unscored_refs(groups: Sequence[Group]) -> list[SampleRef]:
    """References to the samples that still need a reward, numbered from 0."""
    places = [(g.handle, i, s.total_length) for g in groups for i, s in enumerate(g.samples) if s.unscored]
    return [
        SampleRef(handle=handle, position=position, index=index, reward=0.0, length=length)
        for index, (handle, position, length) in enumerate(places)
    ]


def _rewarded(sample: SampleInfo, reward: float) -> SampleInfo:
    if math.isfinite(reward):
        return replace(sample, reward=reward)
    return replace(sample, failed=True, failure=f"reward: the reward model gave {reward!r}")


class RewardStream:
    """Scores groups as they finish.

    together: groups that finish while the model works share the next call. Else every group is a call of its own, so
    that its rewards are the same bit for bit whatever finishes when.
    """

    def __init__(self, learner: RewardModel, *, together: bool) -> None:
        self._learner = learner
        self._together = together
        self._waiting: list[tuple[Group, asyncio.Future[Group]]] = []
        self._work: asyncio.Task[None] | None = None

    async def score(self, group: Group) -> Group:
        """The group with its rewards."""
        if not self._together:
            return (await add_rewards(self._learner, [group]))[0]
        future: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._score_waiting(), name="reward forward")
        return await future

    async def _score_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                scored = await add_rewards(self._learner, [group for group, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), group in zip(batch, scored, strict=True):
                if not future.done():  # the group was cancelled meanwhile
                    future.set_result(group)


def reward_stream(config: TrainPPOConfig, learner: RewardModel) -> RewardStream | None:
    """The stream of a run; None: no reward model, or rewards are computed when sampling is over.

    That is so where the model shares devices, with the engines or with a model that trains, and where a group of its
    own would leave some of its ranks idle.
    """
    train = config.train
    if not config.has_reward_model or train.colocate_all or train.colocate_critic_reward:
        return None
    if not train.async_enable and config.rollout.n_samples_per_prompt < config.reward.world_size:
        return None
    return RewardStream(learner, together=train.async_enable)
