"""What crosses the border from agents to the trainer: token-level trajectories.

Lists of ints and floats only: no tensor, no tokenizer, no engine. One `Trajectory` is one training sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why an episode ended."""

    STOP = "stop"  # the model ended its answer: EOS or a stop string
    LENGTH = "length"  # a generation call (of any turn) reached max_new_tokens, or the sample reached data.max_len
    DONE = "done"  # the environment said done, and no generation call was cut
    MAX_TURNS = "max_turns"  # the turn limit (`agent.max_turns`) was reached
    TIMEOUT = "timeout"  # reset, step or the whole episode took longer than `agent.timeout`
    ABORTED = "aborted"  # the run ended the episode (shutdown, surplus group)
    FAILED = "failed"  # an error: see Trajectory.failure

    @property
    def truncated(self) -> bool:
        """True where the episode was cut off rather than finished."""
        return self in (StopReason.LENGTH, StopReason.MAX_TURNS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failed episode is data, not a crash. `border` names what failed: agent, reward, engine, timeout."""

    border: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One generation call: token_ids[start:end] of the trajectory were sampled by the policy.

    reward: the part of the trajectory's reward that this turn earned; None: the agent rewards no single turns.
    temperature: that it was sampled at, where the agent's client chose another than the run's.
    """

    start: int
    end: int
    finish_reason: str  # the engine's: stop, length, abort
    reward: float | None = None
    temperature: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One sample, token by token. All per-token lists have the length of `token_ids`.

    Example: prompt [5, 6], answer [7, 2] sampled at weight version 3, reward 1::

        Trajectory(
            token_ids=[5, 6, 7, 2], trainable=[0, 0, 1, 1], logprobs=[0.0, 0.0, -0.1, -0.2],
            versions=[-1, -1, 3, 3], prompt_length=2, turns=[Turn(start=2, end=4, finish_reason="stop")],
            stop_reason=StopReason.STOP, group_id="e0-p17", sample_index=0, reward=1.0, score=1.0,
        )

    trainable: 1 where the policy sampled the token, 0 for prompt, environment and appended tokens.
    logprobs: the engine's log-probability of each sampled token (after temperature), 0.0 elsewhere.
    versions: the weight version that sampled the token, -1 elsewhere.
    reward/score: None while unscored and for failed samples.
    """

    token_ids: Sequence[int]
    trainable: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    prompt_length: int
    turns: Sequence[Turn]
    stop_reason: StopReason
    group_id: str
    sample_index: int
    reward: float | None = None
    score: float | None = None
    failure: Failure | None = None
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    images: Sequence[Any] = ()
    prompt: str = ""
    label: Any = ""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        lengths = {"trainable": len(self.trainable), "logprobs": len(self.logprobs), "versions": len(self.versions)}
        wrong = {k: v for k, v in lengths.items() if v != n}
        if wrong:
            raise ValueError(f"Trajectory: per-token lists must have the length of token_ids ({n}), got {wrong}")

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def truncated(self) -> bool:
        return self.stop_reason.truncated

    @property
    def num_trainable(self) -> int:
        return sum(self.trainable)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptItem:
    """One prompt to be rolled out `n` times. `position` is its place in the (shuffled) dataset of this episode.

    columns: what else of the prompt's row travels to agents and rewards, by name; JSON values. environment: the name of
    its agent, in a run with several.
    """

    group_id: str
    prompt: str
    label: Any = ""
    images: Sequence[Any] = ()
    datasource: str = "default"
    position: int = 0
    episode: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
