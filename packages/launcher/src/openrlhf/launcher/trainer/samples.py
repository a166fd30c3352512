"""Trajectories as the controller knows them: their scalars. Imports no torch, so agent workers stay light."""

from __future__ import annotations

from dataclasses import replace

from openrlhf.agents.types import StopReason, Trajectory, Turn
from openrlhf.launcher.trainer.protocols import SampleInfo


def cut(trajectory: Trajectory, max_len: int) -> Trajectory:
    """The first `max_len` tokens of a trajectory; itself where it is not longer. What is cut counts as LENGTH."""
    if len(trajectory.token_ids) <= max_len:
        return trajectory
    turns = [
        Turn(start=t.start, end=min(t.end, max_len), finish_reason=t.finish_reason if t.end <= max_len else "length")
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
    turns = [sum(sample.trainable[t.start : t.end]) for t in sample.turns]
    failure = sample.failure
    return SampleInfo(
        reward=sample.reward,
        score=sample.score,
        total_length=len(sample.token_ids),
        num_trainable=sample.num_trainable,
        longest_turn=max(turns, default=sample.num_trainable),
        truncated=sample.truncated,
        failed=sample.failed,
        failure="" if failure is None else f"{failure.border}: {failure.message}\n{failure.traceback}".rstrip(),
        stop_reason=sample.stop_reason.value,
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
        clipped=len(sample.token_ids) >= max_len,
        extra_logs=dict(sample.extra_logs),
    )
