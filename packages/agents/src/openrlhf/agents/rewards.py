"""Reward sources: who scores a finished group, and how an author's result is read.

A source gets all finished samples of one prompt in one call. A failed, missing or non-finite reward makes the sample
failed; it is never scored 0.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from openrlhf.agents.engine import Tokenizer
from openrlhf.agents.failures import describe, failure_of
from openrlhf.agents.spans import span
from openrlhf.agents.types import Failure, StopReason, Trajectory
from openrlhf.agents.values import as_number, to_floats, to_plain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """Rewards of one group. rewards/scores: one per sample, None where `failures` says why. extra_logs: per sample."""

    rewards: Sequence[float | None]
    scores: Sequence[float | None]
    extra_logs: Sequence[Mapping[str, float]]
    failures: Sequence[Failure | None]


class RewardSource(Protocol):
    """Scores the finished samples of one prompt group.

    queries: full texts (prompt and response, special tokens kept). prompts: the prompts. labels: ground truths.
    responses: the response parts alone, for sources that can use them. columns: the prompt's further data by name, one
    value per query; given where there are any.
    Raises for a failure of the whole call; then every sample of the group fails.
    """

    async def score(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult: ...


class RewardError(RuntimeError):
    """A reward call failed as a whole; `traceback` is the author's, from the other process."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class RewardTimeoutError(RewardError):
    """A reward call took longer than --reward.timeout; its process was killed."""


class RewardProcessDiedError(RewardError):
    """The process around the reward function ended during the call: killed from outside or for the memory that it
    took, or by the function itself."""


def reward_label(label: Any) -> Any:
    """A label as reward functions get it: numbers and booleans as JSON text, None and everything else unchanged."""
    if isinstance(label, (bool, int, float)):
        return json.dumps(label)
    return label


def normalize_rewards(result: Any, count: int, name: str = "reward_func") -> RewardResult:
    """Reads what a reward function returned for `count` samples.

    Accepts a dict with rewards and optional scores and extra_logs, or the rewards alone; tensors, arrays, lists, and
    numbers where count is 1. Raises ValueError naming `name` and both counts where they differ.
    """
    result = to_plain(result)
    fields = result if isinstance(result, Mapping) else {"rewards": result}
    if fields.get("rewards") is None:
        raise ValueError(f'{name} must return a dict with "rewards" ({count} values, one per sample), got {result!r}')
    rewards = to_floats(fields["rewards"], count, f"{name}: rewards")
    given = fields.get("scores")
    scores = rewards if given is None else to_floats(given, count, f"{name}: scores")
    failures = [_check(name, r, s) for r, s in zip(rewards, scores, strict=True)]
    return RewardResult(
        rewards=[None if f else r for r, f in zip(rewards, failures, strict=True)],
        scores=[None if f else s for s, f in zip(scores, failures, strict=True)],
        extra_logs=read_extra_logs(fields.get("extra_logs"), count, name),
        failures=failures,
    )


def _check(name: str, reward: float | None, score: float | None) -> Failure | None:
    for what, value in (("reward", reward), ("score", score)):
        if value is None or not math.isfinite(value):
            return Failure(border="reward", message=f"{name} returned a {what} that is no finite number: {value!r}")
    return None


def read_extra_logs(logs: Any, count: int, name: str) -> list[dict[str, float]]:
    """Per-sample metrics from a dict (scalar or per-sample values) or from one dict per sample.

    What is no finite number (text, None, NaN, a list of another length) is left out for that sample.
    """
    rows: list[dict[str, float]] = [{} for _ in range(count)]
    if logs is None:
        return rows
    if isinstance(logs, (list, tuple)) and len(logs) == count and all(isinstance(row, Mapping) for row in logs):
        for row, given in zip(rows, logs, strict=True):
            _fill(row, given)
        return rows
    if not isinstance(logs, Mapping):
        raise ValueError(f"{name}: extra_logs must be a dict of numbers or of per-sample lists, got {logs!r}")
    for key, value in logs.items():
        plain = to_plain(value)
        values = list(plain) if isinstance(plain, (list, tuple)) else None
        if values is None or (len(values) == 1 and count > 1):
            values = [values[0] if values else plain] * count
        if len(values) != count:
            logger.warning("%s: extra_logs[%r] has %d values for %d samples; left out", name, key, len(values), count)
            continue
        for row, entry in zip(rows, values, strict=True):
            _fill(row, {key: entry})
    return rows


def _fill(row: dict[str, float], given: Mapping[Any, Any]) -> None:
    for key, value in given.items():
        number = as_number(value)
        if number is not None:
            row[str(key)] = number


async def apply_rewards(
    source: RewardSource,
    trajectories: Sequence[Trajectory],
    tokenizer: Tokenizer,
    columns: Mapping[str, Any] = MappingProxyType({}),
) -> list[Trajectory]:
    """The trajectories with rewards: one call for all that did not fail. A failing call fails them, and no others.

    columns: of their prompt (`PromptItem.columns`).
    """
    finished = [t for t in trajectories if not t.failed]
    if not finished:
        return list(trajectories)
    try:
        responses = [tokenizer.decode(t.token_ids[t.prompt_length :], skip_special_tokens=False) for t in finished]
        # An image is one placeholder in the text, as in the prompt, and not the many tokens of the model's input.
        texts = [
            t.prompt + r if t.images else tokenizer.decode(t.token_ids, skip_special_tokens=False)
            for t, r in zip(finished, responses, strict=True)
        ]
        prompts, labels = [t.prompt for t in finished], [reward_label(t.label) for t in finished]
        given: dict[str, Any] = {"responses": responses}
        if columns:  # a source without a place for them goes on working where there are none
            given["columns"] = {name: [value] * len(finished) for name, value in columns.items()}
        with span("reward", samples=len(finished)):
            result = await source.score(texts, prompts, labels, **given)
        scored = _merge(finished, result)
    except Exception as error:
        scored = [_failed(t, _reward_failure(error)) for t in finished]
    merged = iter(scored)
    return [t if t.failed else next(merged) for t in trajectories]


def require_reward(trajectory: Trajectory) -> Trajectory:
    """The trajectory, failed where it has no reward and nobody else gives one."""
    if trajectory.failed or trajectory.reward is not None:
        return trajectory
    message = "the agent returned no reward, and there is no reward model (`reward_model`) to give one"
    return _failed(trajectory, Failure(border="reward", message=message))


def _merge(trajectories: Sequence[Trajectory], result: RewardResult) -> list[Trajectory]:
    count = len(trajectories)
    if len(result.rewards) != count:
        raise ValueError(f"the reward source returned {len(result.rewards)} rewards for {count} samples")
    merged = []
    for i, trajectory in enumerate(trajectories):
        failure = result.failures[i]
        if failure is not None:
            merged.append(_failed(trajectory, failure))
            continue
        logs = {**trajectory.extra_logs, **result.extra_logs[i]}
        merged.append(replace(trajectory, reward=result.rewards[i], score=result.scores[i], extra_logs=logs))
    return merged


def _reward_failure(error: Exception) -> Failure:
    if isinstance(error, RewardTimeoutError):
        return Failure(border="timeout", message=str(error))
    if isinstance(error, RewardError):
        return Failure(border="reward", message=str(error), traceback=error.traceback)
    failure = failure_of(error, "reward")
    return replace(failure, message=describe(error))


def _failed(trajectory: Trajectory, failure: Failure) -> Trajectory:
    n = len(trajectory.token_ids)
    return replace(
        trajectory,
        trainable=[0] * n,
        logprobs=[0.0] * n,
        versions=[-1] * n,
        reward=None,
        score=None,
        failure=failure,
        stop_reason=StopReason.FAILED,
    )
