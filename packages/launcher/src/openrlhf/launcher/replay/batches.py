"""What takes the place of sampling in a replay: `RecordedBatches` gives the trainer the groups of every recorded step.

Tokens, log-probs, rewards and the order of all samples are those of the run. What was sampled and not trained on
counts in baselines and metrics as it did, without tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from openrlhf.agents.types import PromptItem, StopReason, Trajectory
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.logging.sinks import GeneratedSample
from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.record.schema import RecordedGroup
from openrlhf.launcher.samples import EvalRequest, Group, SampleInfo, sample_info
from openrlhf.launcher.trainer.loop import Trainer, TrainerState
from openrlhf.launcher.trainer.pipeline import Pipeline
from openrlhf.launcher.trainer.protocols import PromptSource
from openrlhf.launcher.trainer.untrained import Collected, Untrained

Store = Callable[[Sequence[Trajectory]], Awaitable[Any]]
"""Puts trajectories where the learner's ranks find them, and gives the handle."""


class RecordedRollout:
    """The trainer's `Rollout`: it holds what was sampled and samples nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        raise RuntimeError("a replay has no engines: nothing is sampled")

    async def read_samples(self, group: Group, count: int) -> list[GeneratedSample]:
        """None: they are in the record."""
        return []

    async def fetch(self, group: Group) -> Any:
        raise RuntimeError("a replay's checkpoints hold no samples: they are in the record")

    async def store(self, trajectories: Any) -> Any:
        return await self._store(trajectories)

    async def sleep(self) -> None:
        """There is nothing that could sleep."""

    async def worker_metrics(self) -> dict[str, float]:
        """None."""
        return {}

    async def wake(self) -> None:
        """There is nothing that could wake."""

    async def shutdown(self) -> None:
        """There is nothing to end."""


class NoPrompts:
    """The prompts of a replay: they come with its batches."""

    def start_episode(self, episode: int) -> None: ...

    def next(self, n: int) -> list[PromptItem]:
        return []

    def seen(self, item: PromptItem, samples: Sequence[SampleInfo]) -> None: ...

    def judged(self, item: PromptItem) -> bool:
        return True

    def failing(self) -> dict[str, float]:
        return {}

    def metrics(self) -> dict[str, float]:
        return {}

    def settle(self) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class RecordedBatches(Pipeline):
    """The recorded steps from number `first` on, each as one rollout batch."""

    def __init__(
        self,
        config: TrainPPOConfig,
        rollout: RecordedRollout,
        prompts: PromptSource,
        *,
        record: Record,
        steps: Sequence[int],
    ) -> None:
        super().__init__(config, rollout, prompts)
        self._record = record
        self._steps = list(steps)
        self._recorded = record.steps()

    def resume(self, episode: int, step: int, untrained: Untrained) -> None:
        self.episode = episode
        self._steps = [number for number in self._steps if number > step]
        if self._steps and self._steps[0] != step + 1:
            raise ValueError(
                f"the checkpoint stands after step {step}, and step {step + 1} is not in the record "
                f"{str(self._record.folder)!r}: it begins at {self._steps[0]}"
            )

    async def next(self) -> Collected | None:
        if not self._steps:
            return None
        number = self._steps.pop(0)
        recorded = self._recorded[number]
        self.episode = recorded.before["state"]["episode"]
        images = self._record.images(number)
        groups = [await self._group(group, images) for group in self._record.groups(number, recorded)]
        return Collected(groups=groups, metrics=dict(recorded.sampling))

    async def _group(self, group: RecordedGroup, images: Mapping[str, bytes]) -> Group:
        rows, infos = [], []
        for place in range(group.count):
            sample = group.samples.get(place)
            if sample is None:
                rows.append(_without_tokens(group, place))
                infos.append(SampleInfo(**group.others[place]))
            else:
                rows.append(sample.trajectory([images[name] for name in sample.images]))
                infos.append(sample_info(rows[-1], max_len=self._config.data.max_len))
        first = next(iter(group.samples.values()), None)
        item = PromptItem(
            group_id=group.group_id,
            prompt="" if first is None else first.prompt,
            label="" if first is None else first.label,
            datasource=group.datasource,
            position=group.position,
            episode=group.episode,
        )
        return Group(prompt=item, samples=infos, handle=await self._rollout.store(rows))


def _without_tokens(group: RecordedGroup, place: int) -> Trajectory:
    return Trajectory(
        token_ids=[],
        trainable=[],
        logprobs=[],
        versions=[],
        prompt_length=0,
        turns=[],
        stop_reason=StopReason.STOP,
        group_id=group.group_id,
        sample_index=place,
    )


def steps_of(record: Record, first: int | None, last: int | None) -> list[int]:
    """The steps that a replay trains on, without a gap.

    first: None: the first of the run. Raises ValueError where one of them is not in the record.
    """
    there = record.complete_steps()
    if not there:
        raise ValueError(f"{str(record.folder)!r} holds no complete step: nothing can be replayed")
    first, last = first or 1, last or there[-1]
    missing = sorted(set(range(first, last + 1)) - set(there))
    if missing or first > last:
        raise ValueError(
            f"{str(record.folder)!r} holds the steps {there[0]} to {there[-1]}, and not "
            f"{missing[0] if missing else first}: choose others by --steps FIRST-LAST; the weights of a later first "
            "step are those of a checkpoint (--ckpt.load_enable), else those before training"
        )
    return list(range(first, last + 1))


def as_before(trainer: Trainer, before: Mapping[str, Any]) -> None:
    """Give a new trainer the state that the run's had before a step: counters, KL coefficient, running rewards."""
    trainer.state = TrainerState(**before["state"])
    trainer.kl.load_state_dict(before["kl"])
    if trainer.norm is not None and before["reward_norm"] is not None:
        trainer.norm.load_state_dict(before["reward_norm"])
