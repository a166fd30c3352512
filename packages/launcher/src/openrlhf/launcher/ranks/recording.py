"""What a policy rank records of the samples that it trains on: tensors become rows again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.losses.output import LossOutput
from openrlhf.launcher.ranks.batches import RankBatch
from openrlhf.launcher.record.place import RecordPlace
from openrlhf.launcher.record.sample_writer import SampleWriter, image_name
from openrlhf.launcher.record.schema import RecordedSample
from openrlhf.learner.collective import rank_and_world
from openrlhf.learner.objective import ModelOutputs, PolicyObjective


@dataclass(frozen=True, kw_only=True)
class WatchedObjective(PolicyObjective):
    """The same objective. seen: of every micro-batch the numbers of its samples and their log-probs."""

    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def of(objective: PolicyObjective) -> WatchedObjective:
        """One that watches another one's outputs."""
        return WatchedObjective(**{f.name: getattr(objective, f.name) for f in fields(PolicyObjective)})

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, LossOutput]:
        assert outputs.logprobs is not None, "a policy objective needs a language model"
        self.seen.append((batch.index, outputs.logprobs.detach()))
        return super().__call__(outputs, batch)

    def logprobs(self, like: Batch) -> Tensor | None:
        """What was seen as [B, T] of the samples of a batch; None where one of them was not seen."""
        rows = {index: row for row, index in enumerate(like.index.tolist())}
        out, left = torch.zeros(like.tokens.shape), set(rows)
        for indices, logprobs in self.seen:
            values = logprobs.float().cpu()
            for number, index in enumerate(indices.tolist()):
                if index in rows:
                    out[rows[index], : values.shape[1]] = values[number]
                    left.discard(index)
        return None if left else out


class Recorder:
    """Records every batch once: when it was trained on for the first time, also where that failed."""

    def __init__(self, writer: SampleWriter | None) -> None:
        self._writer = writer
        self._newest = 0

    @staticmethod
    def of(place: RecordPlace | None, ranks_per_sample: int) -> Recorder:
        """This rank's. Of the ranks that are given the same samples the first one writes."""
        rank, _ = rank_and_world()
        writes = place is not None and rank % ranks_per_sample == 0
        return Recorder(SampleWriter(place, rank // ranks_per_sample) if writes and place is not None else None)

    @contextmanager
    def watching(self, prepared: RankBatch, objective: PolicyObjective) -> Iterator[PolicyObjective]:
        """Surrounds an update, whose objective it gives. The trainer's log-probs are those from before any update."""
        if self._writer is None or prepared.step <= self._newest:
            yield objective
            return
        self._newest = prepared.step
        known = prepared.batch.old_logprobs
        watched = WatchedObjective.of(objective)
        try:
            yield objective if known is not None else watched
        finally:
            self._record(self._writer, prepared, known if known is not None else watched.logprobs(prepared.batch))

    def _record(self, writer: SampleWriter, prepared: RankBatch, logprobs: Tensor | None) -> None:
        images: dict[str, bytes] = {}
        names: dict[int, str] = {}
        for origin in prepared.origins:
            for image in origin.trajectory.images:
                if id(image) not in names:
                    names[id(image)] = image_name(image)
                    images[names[id(image)]] = image
        writer.write(prepared.step, recorded_samples(prepared, logprobs, names), images)


def recorded_samples(
    prepared: RankBatch, logprobs: Tensor | None, image_names: Mapping[int, str]
) -> list[RecordedSample]:
    """A row per sample of the share. image_names: of images by their identity in memory."""
    batch = prepared.batch
    mini_batch = {row: number for number, rows in enumerate(prepared.rows) for row in rows}
    tensors = {
        "tokens": batch.tokens.to(torch.int32),
        "trainable": batch.action_mask,
        "engine_logprobs": batch.rollout_logprobs,
        "versions": batch.versions,
        "advantages": batch.advantages,
        "trainer_logprobs": logprobs,
    }
    arrays: dict[str, Any] = {name: None if value is None else value.numpy() for name, value in tensors.items()}
    found = []
    for row, (length, origin) in enumerate(zip(batch.lengths.tolist(), prepared.origins, strict=True)):
        trajectory, sample = origin.trajectory, origin.sample
        own: dict[str, Any] = {n: None if values is None else values[row, :length] for n, values in arrays.items()}
        own["advantages"] = np.where(own["trainable"], own["advantages"], np.float32(0))
        found.append(
            RecordedSample(
                **own,
                step=prepared.step,
                index=sample.index,
                mini_batch=mini_batch[row],
                group_id=trajectory.group_id,
                sample_index=trajectory.sample_index,
                place=sample.position,
                prompt=trajectory.prompt,
                label=trajectory.label,
                prompt_length=trajectory.prompt_length,
                turns=trajectory.turns,
                stop_reason=trajectory.stop_reason,
                reward=sample.raw,
                score=sample.score,
                shaped=sample.reward,
                extra_logs=trajectory.extra_logs,
                images=[image_names[id(image)] for image in trajectory.images],
            )
        )
    return found
