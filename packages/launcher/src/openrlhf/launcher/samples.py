"""Samples as the controller knows them: scalars, and handles of the trajectories. Imports no torch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf.agents.types import PromptItem, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInfo:
    """The scalars of one finished sample; the tokens stay behind the group's handle.

    turns: (trainable tokens, reward) of every turn, in order; a reward is 0 where the turn has none of its own.
    failure: "border: message" of a failed sample, with the traceback. episode: the same number for all branches of an
    episode of a group (`rollout/episodes.py`); None: the sample is the whole episode.
    """

    reward: float | None
    score: float | None
    total_length: int
    num_trainable: int
    longest_turn: int
    truncated: bool
    failed: bool
    failure: str = ""
    stop_reason: str = "stop"
    min_version: int = -1
    max_version: int = -1
    clipped: bool = False  # reached data.max_len
    prompt_length: int = 0  # tokens before the first sampled one
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    answer: int = 0  # a checksum of the sampled tokens: equal answers have equal ones
    episode: int | None = None
    turns: Sequence[tuple[int, float]] = ()

    @property
    def turn_rewards(self) -> list[float] | None:
        """The rewards of the turns that have trainable tokens; None where some of these belong to no turn."""
        trainable = [(tokens, reward) for tokens, reward in self.turns if tokens]
        covered = sum(tokens for tokens, _ in trainable) == self.num_trainable > 0
        return [reward for _, reward in trainable] if covered else None

    @property
    def unscored(self) -> bool:
        """Whether it still needs a reward."""
        return not self.failed and self.reward is None

    @property
    def failure_kind(self) -> str:
        """The border that the sample failed at: agent, reward, engine or timeout; "" where it did not fail."""
        return self.failure.partition(":")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All samples of one prompt. `handle` resolves to list[Trajectory], parallel to `samples`."""

    prompt: PromptItem
    samples: Sequence[SampleInfo]
    handle: Any

    @property
    def position(self) -> int:
        """The prompt's place in the order of its episode."""
        return self.prompt.position

    @property
    def scores(self) -> list[float | None]:
        """One score per sample; None for a failed or unscored one."""
        return [s.score for s in self.samples]

    @property
    def failures(self) -> list[str]:
        """The failure texts of the failed samples."""
        return [s.failure for s in self.samples if s.failed]


NO_REWARD = (
    "agent: the sample came back without a reward, and nothing else gives one: return a number as its reward from "
    "execute() (--train.agent_func_path)"
)


def fail_unscored(group: Group) -> Group:
    """The group whose samples without a reward have failed: nothing will give them one."""
    if not any(s.unscored for s in group.samples):
        return group
    return replace(
        group, samples=[replace(s, failed=True, failure=NO_REWARD) if s.unscored else s for s in group.samples]
    )


def fail_misplaced(group: Group) -> Group:
    """The group whose samples have failed of which a turn's reward cannot be credited to tokens of that turn."""
    found = [None if s.failed else _misplaced(s) for s in group.samples]
    if not any(found):
        return group
    failed = {n: replace(group.samples[n], failed=True, failure=f"agent: {why}") for n, why in enumerate(found) if why}
    return replace(group, samples=[failed.get(n, s) for n, s in enumerate(group.samples)])


def _misplaced(sample: SampleInfo) -> str | None:
    for number, (tokens, reward) in enumerate(sample.turns, start=1):
        if reward and not tokens:
            return f"turn {number} earned {reward!r} and has no trainable token to credit it to (--algo.turn_rewards)"
    if sample.num_trainable and sample.turn_rewards is None:
        count = sum(tokens for tokens, _ in sample.turns)
        return (
            f"its {len(sample.turns)} turns have {count} of {sample.num_trainable} trainable tokens, and "
            "--algo.turn_rewards credits turns: give the trajectory a Turn for every range that was sampled"
        )
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRef:
    """Where one training sample lies: `handle` resolves to a list of trajectories, this is number `position`.

    index: the sample's number in the rollout batch. reward: shaped, after the baseline. length: tokens in all.
    prompt_length: how many of them all samples behind this handle begin with. raw, score: before shaping.
    turn_rewards: what the last trainable tokens of its turns get in the place of `reward`; None: turns share it.
    """

    handle: Any
    position: int
    index: int
    reward: float
    length: int
    prompt_length: int = 0
    raw: float | None = None
    score: float | None = None
    turn_rewards: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRequest:
    """How evaluation samples differ from training samples."""

    temperature: float
    n_samples_per_prompt: int


def cut(trajectory: Trajectory, max_len: int) -> Trajectory:
    """The first `max_len` tokens of a trajectory; itself where it is not longer. What is cut counts as LENGTH."""
    if len(trajectory.token_ids) <= max_len:
        return trajectory
    turns = [
        replace(t, end=min(t.end, max_len), finish_reason=t.finish_reason if t.end <= max_len else "length")
        for t in trajectory.turns
        if t.start < max_len
    ]
    return replace(
        trajectory,
        token_ids=trajectory.token_ids[:max_len],
        trainable=trajectory.trainable[:max_len],
        logprobs=trajectory.logprobs[:max_len],
        versions=trajectory.versions[:max_len],
        prompt_length=min(trajectory.prompt_length, max_len),
        turns=turns,
        stop_reason=trajectory.stop_reason if trajectory.failed else StopReason.LENGTH,
    )


def sample_info(trajectory: Trajectory, *, max_len: int) -> SampleInfo:
    """The scalars of a trajectory as it will be trained on: cut to `max_len` tokens."""
    sample = cut(trajectory, max_len)
    versions = [v for v, sampled in zip(sample.versions, sample.trainable, strict=True) if sampled]
    turns = [(sum(sample.trainable[t.start : t.end]), t.reward or 0.0) for t in sample.turns]
    failure = sample.failure
    return SampleInfo(
        reward=sample.reward,
        score=sample.score,
        total_length=len(sample.token_ids),
        num_trainable=sample.num_trainable,
        longest_turn=max((tokens for tokens, _ in turns), default=sample.num_trainable),
        truncated=sample.truncated,
        failed=sample.failed,
        failure="" if failure is None else f"{failure.border}: {failure.message}\n{failure.traceback}".rstrip(),
        stop_reason=sample.stop_reason.value,
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
        clipped=len(sample.token_ids) >= max_len,
        prompt_length=sample.prompt_length,
        extra_logs=dict(sample.extra_logs),
        episode=sample.sample_index,
        turns=turns,
        answer=zlib.crc32(repr([t for t, own in zip(sample.token_ids, sample.trainable, strict=True) if own]).encode()),
    )
