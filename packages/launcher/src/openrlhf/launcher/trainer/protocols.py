"""What the trainer needs of the world: a `Rollout` that samples and a `Learner` that learns.

The trainer holds scalars and opaque handles, never tensors: a handle is whatever the implementation can resolve
(an object reference under Ray, the object itself with fakes). Every call is a coroutine with a bound of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.logging.sinks import GeneratedSample


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInfo:
    """The scalars of one finished sample; the tokens stay behind the group's handle.

    failure: "border: message" of a failed sample, with the traceback.
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
    extra_logs: Mapping[str, float] = field(default_factory=dict)

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
    """Samples groups with the weights that the engines hold."""

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        """Sample and score one prompt's group. A failed sample is data; an error means that no worker is left."""
        ...

    async def read_samples(self, group: Group, count: int) -> list[GeneratedSample]:
        """The first `count` samples of a group as text."""
        ...

    async def fetch(self, group: Group) -> Any:
        """What the group's handle resolves to, as plain data for a checkpoint."""
        ...

    async def store(self, trajectories: Any) -> Any:
        """A handle of this run for what `fetch` gave in an earlier one."""
        ...

    async def sleep(self) -> None:
        """Free the engines' device memory; the next weight push or `wake` brings them back."""
        ...

    async def wake(self) -> None:
        """Make the engines ready to sample with the weights they had; nothing where they are awake."""
        ...

    async def shutdown(self) -> None: ...


class Learner(Protocol):
    """Trains on samples. Every call is collective over all learner ranks and returns reduced scalars."""

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        """The in-cluster reward model's raw reward of each sample, in order."""
        ...

    async def reward_statistics(self) -> tuple[float, float] | None:
        """(mean, std) of the rewards that the in-cluster reward model's configuration carries, if it does."""
        ...

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float) -> dict[str, float]:
        """Load a rollout batch, cut in mini-batches: log-probs, values and KL where needed, advantages.

        Returns the batch's mean metrics.
        """
        ...

    async def update(self, order: Sequence[int], *, kl_coef: float, freeze_actor: Sequence[bool]) -> dict[str, float]:
        """One optimiser step per prepared mini-batch, in this order. Returns mean metrics."""
        ...

    async def push_weights(self, version: int) -> dict[str, float]:
        """Send the weights to every engine under this version and check them. Returns rollout/sync_error."""
        ...

    async def save(self, folder: str) -> None:
        """Write everything that a resumed run needs into `folder`/actor (and /critic)."""
        ...

    async def load(self, folder: str) -> None:
        """Restore what `save` wrote."""
        ...

    async def export(self, path: str, *, trial: bool = False) -> None:
        """Write the policy as a Hugging Face model with its tokenizer. trial: and remove it again."""
        ...

    async def shutdown(self) -> None: ...
