"""Tasks for a table as the policy, whose success is known exactly: independent turns, and chains of all lengths.

The samples are the policy's; rewards, credit, advantages, losses and steps are the production code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.agents.types import PromptItem, StopReason, Trajectory, Turn
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.samples import EvalRequest, Group, sample_info
from openrlhf.launcher.trainer.loop import Trainer, TrainerParts
from support.toy_ranks import ToyRanks, ToyRollout, toy_ranks
from support.trainer_fakes import FakePrompts, FakeSink

GOAL = 0.9
"""Success that a policy is trained to."""


class GoalReached(Exception):  # noqa: N818 - the end of a run, no error
    """The policy is good enough."""


@dataclass
class Turns(ToyRollout):
    """`length` turns of one token each; turn k begins with token k of the environment, and token `right[k]` earns 1."""

    right: Tensor = field(default_factory=lambda: torch.zeros(0))
    episodes: int = 0

    def success(self) -> float:
        """Mean reward of a turn."""
        logp = _table(self).log_softmax(-1)
        return float(logp[torch.arange(self.length), self.right].exp().mean())

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        if self.success() >= GOAL:
            raise GoalReached
        logp = _table(self)[: self.length].log_softmax(-1)
        found = torch.multinomial(logp.exp(), self.n, replacement=True, generator=self.generator).T
        self.episodes += self.n
        rows = [self._episode(i, tokens, logp) for i, tokens in enumerate(found)]
        return Group(prompt=item, samples=[sample_info(row, max_len=64) for row in rows], handle=rows)

    def _episode(self, number: int, tokens: Tensor, logp: Tensor) -> Trajectory:
        k = self.length
        rewards = (tokens == self.right).double().tolist()
        chosen = logp[torch.arange(k), tokens].tolist()
        return Trajectory(
            token_ids=[t for pair in enumerate(tokens.tolist()) for t in pair],
            trainable=[0, 1] * k,
            logprobs=[v for value in chosen for v in (0.0, value)],
            versions=[-1, 0] * k,
            prompt_length=1,
            turns=[Turn(start=2 * i + 1, end=2 * i + 2, finish_reason="stop", reward=r) for i, r in enumerate(rewards)],
            stop_reason=StopReason.DONE,
            group_id="g",
            sample_index=number,
            reward=sum(rewards),
            score=sum(rewards),
        )


@dataclass
class Chains(ToyRollout):
    """A prompt "s n" asks for the n tokens that follow token s in a hidden order: 1 where all are right, else 0.

    A token's successor is the same in all prompts, so what is learned on short chains serves the long ones.
    """

    following: Tensor = field(default_factory=lambda: torch.zeros(0))
    tasks: list[tuple[int, int]] = field(default_factory=list)
    episodes: int = 0

    def success(self) -> float:
        """Mean over all prompts of the probability of a right answer."""
        logp = _table(self).log_softmax(-1)
        step = logp[torch.arange(len(self.following)), self.following]
        total = 0.0
        for start, length in self.tasks:
            token, value = start, 0.0
            for _ in range(length):
                value += float(step[token])
                token = int(self.following[token])
            total += float(np.exp(value))
        return total / len(self.tasks)

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        start, length = map(int, item.prompt.split())
        logp = _table(self).log_softmax(-1)
        tokens = torch.full((self.n, 1), start)
        for _ in range(length):
            last = logp[tokens[:, -1]].exp()
            tokens = torch.cat([tokens, torch.multinomial(last, 1, generator=self.generator)], 1)
        self.episodes += self.n
        right = (tokens[:, 1:] == self.following[tokens[:, :-1]]).all(1).tolist()
        chosen = logp[tokens[:, :-1], tokens[:, 1:]].tolist()
        rows = [self._answer(i, *row) for i, row in enumerate(zip(tokens.tolist(), chosen, right, strict=True))]
        return Group(prompt=item, samples=[sample_info(row, max_len=64) for row in rows], handle=rows)

    def _answer(self, number: int, tokens: list[int], chosen: list[float], right: bool) -> Trajectory:
        n = len(tokens)
        return Trajectory(
            token_ids=tokens,
            trainable=[0] + [1] * (n - 1),
            logprobs=[0.0, *chosen],
            versions=[-1] + [0] * (n - 1),
            prompt_length=1,
            turns=[Turn(start=1, end=n, finish_reason="stop")],
            stop_reason=StopReason.STOP,
            group_id="g",
            sample_index=number,
            reward=float(right),
            score=float(right),
        )


class Tasks:
    """The prompts of `Chains` as a data set."""

    def __init__(self, tasks: list[tuple[int, int]]) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def item(self, index: int, *, episode: int = 0, position: int = 0) -> PromptItem:
        start, length = self.tasks[index]
        group = f"e{episode}-p{index}"
        return PromptItem(group_id=group, prompt=f"{start} {length}", position=position, episode=episode)

    def places(self) -> tuple[list[str], Any, Any]:
        return ["chains"], np.zeros(len(self), np.int32), np.arange(len(self), dtype=np.int64)


class Watched(FakeSink):
    """Looks at the policy after every step, until it is good enough."""

    def __init__(self, success: Callable[[], float]) -> None:
        super().__init__()
        self._success = success

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        super().log_step(step, metrics)
        if self._success() >= GOAL:
            raise GoalReached


def _table(rollout: ToyRollout) -> Tensor:
    learner: Any = rollout.policy.learner
    return learner.table.detach()


def configuration(flags: dict[str, Any]) -> TrainPPOConfig:
    """Of a run on a table: groups of 8, no KL."""
    n, size = flags.get("rollout.n_samples_per_prompt", 8), flags.get("rollout.batch_size", 4)
    defaults = {
        "rollout.batch_size": size,
        "rollout.n_samples_per_prompt": n,
        "train.batch_size": n * size,
        "algo.kl.init_coef": 0.0,
        "reward.remote_url": "reward.py",
        "ckpt.output_dir": "/exported",
        "logger.health": "off",
    }
    return build(TrainPPOConfig(), defaults | flags)


def episodes_to_goal(config: TrainPPOConfig, rollout: Any, ranks: ToyRanks, prompts: Any, limit: int) -> int:
    """Episodes that were sampled until the policy reached GOAL; `limit` where it did not before."""
    sink = Watched(rollout.success)

    async def within(item: PromptItem, **options: Any) -> Group:
        if rollout.episodes >= limit:
            raise GoalReached
        return await type(rollout).run_group(rollout, item, **options)

    rollout.run_group = within
    trainer = Trainer(config, TrainerParts(rollout=rollout, learner=ranks, prompts=prompts, sink=sink))
    with suppress(GoalReached):
        asyncio.run(trainer.run())
    return min(rollout.episodes, limit)


def train_turns(turns: int, *, vocabulary: int, seed: int, lr: float, limit: int, **flags: Any) -> int:
    """Episodes until turns of `Turns` succeed."""
    config = configuration(flags)
    generator = torch.Generator().manual_seed(seed)
    right = torch.randint(vocabulary, (turns,), generator=generator)
    ranks = toy_ranks(config, torch.zeros(vocabulary, vocabulary), lr=lr)
    n = config.rollout.n_samples_per_prompt
    rollout = Turns(ranks.policy, n=n, length=turns, reward=None, generator=generator, right=right)
    return episodes_to_goal(config, rollout, ranks, FakePrompts(10**9), limit)


def train_chains(order: Callable[..., Any], *, vocabulary: int, seed: int, lr: float, limit: int, **flags: Any) -> int:
    """Episodes until chains of 1, 2, 4 and 8 tokens succeed. order: makes the source of prompts."""
    config = configuration({"train.num_episodes": 10**9, "train.seed": seed, **flags})
    generator = torch.Generator().manual_seed(seed)
    ranks = toy_ranks(config, torch.zeros(vocabulary, vocabulary), lr=lr)
    cycle = torch.randperm(vocabulary, generator=generator)
    following = torch.empty_like(cycle)
    following[cycle] = cycle.roll(-1)
    tasks = [(start, length) for start in range(vocabulary) for length in (1, 2, 4, 8)]
    options: dict[str, Any] = {"reward": None, "generator": generator, "following": following, "tasks": tasks}
    rollout = Chains(ranks.policy, n=config.rollout.n_samples_per_prompt, length=0, **options)
    return episodes_to_goal(config, rollout, ranks, order(Tasks(tasks), config.data, seed), limit)
