"""What the trainer needs of the world: prompts, a `Rollout` that samples, a `Learner` that learns, a sink for metrics.

The trainer holds scalars and opaque handles, never tensors: a handle is whatever the implementation can resolve
(an object reference under Ray, the object itself with fakes). Every call is a coroutine with a bound of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.logging.sinks import GeneratedSample
from openrlhf.launcher.samples import EvalRequest, Group, SampleInfo, SampleRef


class PromptSource(Protocol):
    """Prompts of one episode after the other, in a seeded order."""

    def start_episode(self, episode: int) -> None: ...

    def next(self, n: int) -> list[PromptItem]: ...

    def seen(self, item: PromptItem, samples: Sequence[SampleInfo]) -> None:
        """A group is finished: also one that no batch takes."""
        ...

    def judged(self, item: PromptItem) -> bool:
        """Whether failures of this prompt count towards --rollout.max_failed_fraction."""
        ...

    def failing(self) -> dict[str, float]:
        """Environment -> share of its last episodes that failed, of those where some did."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def settle(self) -> None:
        """A rollout batch is full."""
        ...

    def close(self) -> None:
        """The run is over, however it ended."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MetricSink(Protocol):
    """Where metrics go; it never raises. run_id: the run's name there, the same after a restart."""

    run_id: str

    def resume(self, step: int) -> None: ...

    def log_step(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rollout batch that can be trained on. handle: the learner's own. metrics: means over the batch."""

    handle: Any
    metrics: dict[str, float] = field(default_factory=dict)


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

    async def worker_metrics(self) -> dict[str, float]:
        """engine/... and reward/...: what engines and reward sources measured of themselves since the last call."""
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

    async def prepare(self, mini_batches: Sequence[Sequence[SampleRef]], *, kl_coef: float, step: int = 0) -> Prepared:
        """Load a rollout batch, cut in mini-batches: log-probs, values and KL where needed, advantages.

        step: its number, counted from 1, by which it is recorded; 0: it is not recorded.
        The batch can be trained on until the next one is prepared.
        """
        ...

    async def update(
        self,
        prepared: Prepared,
        order: Sequence[int],
        *,
        kl_coef: float,
        freeze_actor: Sequence[bool],
        members: str | None = None,
    ) -> dict[str, float]:
        """One optimiser step per mini-batch, in this order. Returns mean metrics.

        members: a seed by which every rank deals its samples anew to the mini-batches; None: as they were prepared.
        """
        ...

    async def push_weights(self, version: int) -> dict[str, float]:
        """Send the weights to every engine under this version and check them. Returns rollout/sync_error."""
        ...

    async def sync_reference(self) -> None:
        """Move the reference towards the policy by --ref.sync_alpha."""
        ...

    async def blind_to(self, path: str) -> list[str]:
        """Names of the machines whose processes do not see a file that this one has made."""
        ...

    async def save(self, folder: str) -> dict[str, int]:
        """Write everything that a resumed run needs into `folder`/actor (and /critic, and /ref of one that moves).

        Returns the files that the ranks see there, by their path in `folder`, with their bytes.
        """
        ...

    async def load(self, folder: str) -> None:
        """Restore what `save` wrote."""
        ...

    async def export(self, path: str, *, trial: bool = False) -> None:
        """Write the policy as a Hugging Face model with its tokenizer. trial: and remove it again."""
        ...

    async def shutdown(self) -> None: ...
