"""Reads what `reset` and `step` of an agent return, and adds the turns of an episode up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.recorder import Outcome
from openrlhf.agents.sampling import as_sampling
from openrlhf.agents.types import StopReason
from openrlhf.agents.values import finite_logs, to_finite, to_plain

STEP_CONTRACT = (
    'step() must return a dict: {"rewards": number or tensor, "environment_feedback": str, "done": bool}, optionally '
    '"scores", "extra_logs", "sampling_params", "environment_images"'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One turn's answer of the environment, as plain Python. score None: not given."""

    reward: float
    feedback: str
    done: bool
    score: float | None = None
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    sampling: SamplingParams | None = None
    images: Sequence[Any] = ()


@dataclass(slots=True)
class EpisodeTotals:
    """Rewards add up; the score is the last one given, else that sum; extra logs keep the last value of each key."""

    reward: float = 0.0
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        self.reward += result.reward
        if result.score is not None:
            self.score = result.score
        self.extra_logs.update(result.extra_logs)

    def outcome(self, stop_reason: StopReason) -> Outcome:
        score = self.reward if self.score is None else self.score
        return Outcome(stop_reason=stop_reason, reward=self.reward, score=score, extra_logs=self.extra_logs)


def read_observation(result: Any) -> str:
    """The text that `reset` returns."""
    if not isinstance(result, Mapping) or "observation" not in result:
        raise ValueError(f'reset() must return {{"observation": str}}, got {result!r}')
    observation = result["observation"]
    if not isinstance(observation, str):
        raise ValueError(f'reset() must return "observation" as str, got {type(observation).__name__}: {observation!r}')
    return observation


def read_step(result: Any) -> StepResult:
    """The dict that `step` returns, checked. Raises ValueError that names the key and the contract."""
    if not isinstance(result, Mapping):
        raise ValueError(f"{STEP_CONTRACT}; got {type(result).__name__}: {result!r}")
    missing = [key for key in ("rewards", "done") if result.get(key) is None]
    if missing:
        raise ValueError(f"{STEP_CONTRACT}; {missing} missing in {dict(result)!r}")
    done = _read_done(result["done"])
    if not done and "environment_feedback" not in result:
        raise ValueError(f"{STEP_CONTRACT}; ['environment_feedback'] missing in {dict(result)!r}")
    score, sampling = result.get("scores"), result.get("sampling_params")
    return StepResult(
        reward=to_finite(result["rewards"], "step()", "rewards"),
        feedback=_read_feedback(result.get("environment_feedback")),
        done=done,
        score=None if score is None else to_finite(score, "step()", "scores"),
        extra_logs=finite_logs(result.get("extra_logs")),
        sampling=None if sampling is None else as_sampling(sampling).with_(seed=None),
        images=tuple(result.get("environment_images") or ()),
    )


def _read_done(value: Any) -> bool:
    plain = to_plain(value)
    if isinstance(plain, (bool, int)):
        return bool(plain)
    if isinstance(plain, list) and len(plain) == 1:
        return _read_done(plain[0])
    raise ValueError(f'step() must return "done" as bool, got {value!r}')


def _read_feedback(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise ValueError(f'step() must return "environment_feedback" as str, got {type(value).__name__}: {value!r}')
