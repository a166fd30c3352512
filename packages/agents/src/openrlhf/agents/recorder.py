"""Token bookkeeping of one episode: ids, mask, log-probs and versions, exactly as the engine gave them.

Nothing here tokenises: what was sampled stays as sampled, what was appended has mask 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.agents.engine import FINISH_REASONS, EngineError, Generation
from openrlhf.agents.types import Failure, PromptItem, StopReason, Trajectory, Turn

CAME_TO_ITS_END = (StopReason.STOP, StopReason.DONE, StopReason.MAX_TURNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an episode ended: everything of a trajectory that is not a token."""

    stop_reason: StopReason
    reward: float | None = None
    score: float | None = None
    failure: Failure | None = None
    extra_logs: Mapping[str, float] | None = None


class Recorder:
    """Collects the tokens of one episode.

    Example: prompt [5, 6], then the engine samples [7]::

        recorder = Recorder([5, 6])
        recorder.append_sampled(Generation(token_ids=[7], logprobs=[-0.1], versions=[0], finish_reason="stop"))
        recorder.append_environment([8, 9])
        recorder.trainable  # [0, 0, 1, 0, 0]
    """

    def __init__(self, prompt_ids: Sequence[int] = (), images: Sequence[Any] = ()) -> None:
        self.token_ids: list[int] = list(prompt_ids)
        self.trainable: list[int] = [0] * len(self.token_ids)
        self.logprobs: list[float] = [0.0] * len(self.token_ids)
        self.versions: list[int] = [-1] * len(self.token_ids)
        self.prompt_length = len(self.token_ids)
        self.turns: list[Turn] = []
        self.images: list[Any] = list(images)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_sampled(self, generation: Generation, temperature: float | None = None) -> None:
        """One turn of the policy. Raises EngineError where the engine's lists do not belong together.

        temperature: that it was sampled at, where it is not the run's.
        """
        check_generation(generation)
        start = len(self.token_ids)
        self.token_ids.extend(generation.token_ids)
        self.trainable.extend([1] * len(generation.token_ids))
        self.logprobs.extend(generation.logprobs)
        self.versions.extend(generation.versions)
        end, reason = len(self.token_ids), generation.finish_reason
        self.turns.append(Turn(start=start, end=end, finish_reason=reason, temperature=temperature))

    def reward_turn(self, reward: float, number: int = -1) -> None:
        """What turn `number` (the last one) earned of the episode's reward."""
        self.turns[number] = replace(self.turns[number], reward=reward)

    def append_environment(self, token_ids: Sequence[int]) -> None:
        """Tokens of the environment: mask 0, no log-prob, no version."""
        self.token_ids.extend(token_ids)
        self.trainable.extend([0] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))
        self.versions.extend([-1] * len(token_ids))

    def finish(self, item: PromptItem, sample_index: int, outcome: Outcome) -> Trajectory:
        """The trajectory; what is appended later does not reach it. A failed episode keeps its tokens to look at, but
        none of them is trainable.

        An episode that came to its end, though a generation call of it was cut, ended because of length.
        """
        failed = outcome.failure is not None
        zeros = [0] * len(self.token_ids)
        return Trajectory(
            token_ids=self.token_ids.copy(),
            trainable=zeros if failed else self.trainable.copy(),
            logprobs=[0.0] * len(zeros) if failed else self.logprobs.copy(),
            versions=[-1] * len(zeros) if failed else self.versions.copy(),
            prompt_length=self.prompt_length,
            turns=tuple(self.turns),
            stop_reason=ended_by(outcome.stop_reason, self.turns),
            group_id=item.group_id,
            sample_index=sample_index,
            reward=None if failed else outcome.reward,
            score=None if failed else outcome.score,
            failure=outcome.failure,
            extra_logs=dict(outcome.extra_logs or {}),
            images=tuple(self.images),
            prompt=item.prompt,
            label=item.label,
        )


def ended_by(reason: StopReason, turns: Iterable[Turn]) -> StopReason:
    """LENGTH for an episode that came to its end although a generation call was cut (`--rollout.max_new_tokens`)."""
    cut = any(turn.finish_reason == "length" for turn in turns)
    return StopReason.LENGTH if cut and reason in CAME_TO_ITS_END else reason


def check_generation(generation: Generation) -> None:
    """Every sampled token has a finite log-prob and a version, and the finish reason is known; else EngineError."""
    n = len(generation.token_ids)
    if generation.finish_reason not in FINISH_REASONS:
        raise EngineError(
            f"the engine ended the request with finish_reason {generation.finish_reason!r}; an answer ends with one of "
            f"{', '.join(FINISH_REASONS)}"
        )
    if len(generation.logprobs) != n or len(generation.versions) != n:
        raise EngineError(
            f"the engine returned {n} tokens, {len(generation.logprobs)} log-probs and "
            f"{len(generation.versions)} versions for one request"
        )
    for i, value in enumerate(generation.logprobs):
        if value is None or not math.isfinite(value):
            raise EngineError(f"logprob {i} of {n} of the request is invalid: {value!r}")


def failed_trajectory(
    item: PromptItem,
    sample_index: int,
    failure: Failure,
    *,
    recorder: Recorder | None = None,
    stop_reason: StopReason = StopReason.FAILED,
) -> Trajectory:
    """A sample that did not come to an end: never trained on, never scored 0."""
    outcome = Outcome(stop_reason=stop_reason, failure=failure)
    return (recorder or Recorder()).finish(item, sample_index, outcome)


def failed_group(item: PromptItem, n_samples: int, failure: Failure) -> list[Trajectory]:
    """All samples of a prompt failed for one reason, for example because their worker was replaced."""
    return [failed_trajectory(item, i, failure) for i in range(n_samples)]
