"""What the trainer needs of the world: a `Rollout` that samples and a `Learner` that learns.

The trainer holds scalars and opaque handles, never tensors: a handle is whatever the implementation can resolve
(an object reference under Ray, the object itself with fakes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.agents.types import PromptItem


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInfo:
    """The scalars of one finished sample; the tokens stay behind the group's handle."""

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
    extra_logs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All samples of one prompt. `handle` resolves to list[Trajectory], parallel to `samples`."""

    prompt: PromptItem
    samples: Sequence[SampleInfo]
    handle: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRef:
    """Where one training sample lies: `handle` resolves to a list of trajectories, this is number `position`.

    index: the sample's number in the rollout batch. reward: shaped, after the baseline. length: tokens in all.
    """

    handle: Any
    position: int
    index: int
    reward: float
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRequest:
    """How evaluation samples differ from training samples."""

    temperature: float
    n_samples_per_prompt: int


class Rollout(Protocol):
    """Samples groups with the current weights."""

    def generate(self, prompts: Sequence[PromptItem], *, evaluation: EvalRequest | None = None) -> list[Group]:
        """Roll every prompt out; the groups come back in the order of `prompts`."""
        ...

    def shutdown(self) -> None: ...


class Learner(Protocol):
    """Trains on samples. Every call is collective over all learner ranks and returns reduced scalars."""

    def prepare(self, samples: Sequence[SampleRef], *, kl_coef: float) -> dict[str, float]:
        """Load the rollout batch: log-probs, values and KL where needed, advantages. Returns batch metrics."""
        ...

    def update(self, *, kl_coef: float, epoch: int) -> dict[str, float]:
        """All optimiser steps of one epoch over the prepared batch. Returns mean metrics and "optimizer_steps"."""
        ...

    def push_weights(self, version: int) -> dict[str, float]:
        """Send the weights to every engine under this version and check them. Returns rollout/sync_error."""
        ...

    def export(self, path: str) -> None:
        """Write the policy as a Hugging Face model with its tokenizer."""
        ...

    def shutdown(self) -> None: ...
