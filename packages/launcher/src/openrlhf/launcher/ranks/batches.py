"""The tensor border: trajectories (lists) become a `Batch` (tensors). Lists before it, tensors after it.

Nothing is computed here that learns: no advantage, no baseline; rewards come in shaped. What one rank computed for
another travels as {sample index: values of its trainable tokens}, since the two may hold different shares; metrics
travel as (sum, count), so that they add up exactly over mini-batches and ranks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from openrlhf.agents.types import Trajectory, Turn
from openrlhf.core.batch import Batch, pad_rows
from openrlhf.launcher.ranks.images import ImageTensors, image_rows
from openrlhf.launcher.samples import SampleRef, cut

PerSample = Mapping[int, Tensor]
"""Sample index -> float32 values of its trainable tokens, in order."""

ToldPerSample = Mapping[int, Mapping[str, Tensor]]
"""Sample index -> what a teacher says of its trainable tokens, in order: tensors [n, ...] by name."""

Sums = dict[str, tuple[float, float]]
"""Metric -> (sum, count) over one rank."""


@dataclass(frozen=True)
class Origin:
    """Where a row comes from: the trajectory without its tokens, and how the trainer referred to it."""

    trajectory: Trajectory
    sample: SampleRef

    @staticmethod
    def of(trajectory: Trajectory, sample: SampleRef, max_len: int) -> Origin:
        """What is left of a sample when its tokens are in tensors; nothing of it holds the group's handle."""
        empty = {"token_ids": (), "trainable": (), "logprobs": (), "versions": ()}
        return Origin(replace(cut(trajectory, max_len), **empty), replace(sample, handle=None))


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One rank's share of a rollout batch, as far as it has been prepared.

    batch: all samples of the share. rows: those of every mini-batch. metrics: what preparing it measured.
    origins: of every row what the tensors do not tell. step: the number of the rollout batch, counted from 1.
    """

    batch: Batch
    rows: Sequence[Sequence[int]]
    metrics: Sums = field(default_factory=dict)
    origins: Sequence[Origin] = ()
    step: int = 0

    def with_(self, **tensors: Any) -> RankBatch:
        """A copy whose batch has these fields replaced."""
        return replace(self, batch=self.batch.with_(**tensors))

    def dealt(self, members: str | None) -> RankBatch:
        """The samples dealt anew to the mini-batches, as many to each as before; with None nothing changes.

        No sample leaves its rank. Every rank deals its samples by falling length with the same seed, so the n-th
        longest of all ranks come into one mini-batch, whose tokens stay as evenly spread over ranks as the batch's.
        """
        if members is None:
            return self
        lengths, index = self.batch.lengths.tolist(), self.batch.index.tolist()
        pool = sorted((row for rows in self.rows for row in rows), key=lambda row: (-lengths[row], index[row]))
        seeded = random.Random(members)
        place = {row: seeded.random() for row in pool}
        hand = iter(sorted(pool, key=place.__getitem__))
        return replace(self, rows=[sorted(next(hand) for _ in rows) for rows in self.rows])

    def mini_batch(self, number: int) -> Batch:
        """This rank's part of one mini-batch, perhaps without a sample."""
        return self.batch.select(self.rows[number])


def build_batch(
    trajectories: Sequence[Trajectory],
    *,
    indices: Sequence[int],
    rewards: Sequence[float],
    max_len: int,
    pad_token_id: int = 0,
    image_processor: ImageTensors | None = None,
    turn_rewards: Sequence[Sequence[float] | None] = (),
) -> Batch:
    """Samples as a right-padded `Batch` of [B, T], T = the longest of them, at most `max_len`.

    trajectories: B samples, none of them failed. indices: their numbers in the rollout batch. rewards: shaped, after
    the baseline; turn_rewards: those of a sample's turns in its place, where it has them. Tokens beyond `max_len` are
    cut off with everything that belongs to them.
    Where no token was sampled, rollout_logprobs is 0 and versions is -1, whatever the trajectory holds there.
    image_processor: turns the samples' images into `extra`; without one, images are an error.
    Raises ValueError for lists of different lengths, for a sample whose first token is trainable, and for images that
    a text model would have to see.
    """
    if not len(trajectories) == len(indices) == len(rewards):
        raise ValueError(
            f"build_batch needs one index and one reward per trajectory, got {len(trajectories)} trajectories, "
            f"{len(indices)} indices, {len(rewards)} rewards"
        )
    rows = [cut(t, max_len) for t in trajectories]
    for number, row in zip(indices, rows, strict=True):
        if row.trainable and row.trainable[0]:
            raise ValueError(
                f"sample {number} ({row.group_id}): its first token is marked as sampled, without a prompt"
            )
    width = max((len(r.token_ids) for r in rows), default=0)
    action_mask = pad_rows([r.trainable for r in rows], width=width, value=0, dtype=torch.bool)
    logprobs = pad_rows([r.logprobs for r in rows], width=width, value=0.0, dtype=torch.float32)
    versions = pad_rows([r.versions for r in rows], width=width, value=-1, dtype=torch.int32)
    return Batch(
        tokens=pad_rows([r.token_ids for r in rows], width=width, value=pad_token_id, dtype=torch.long),
        attention_mask=pad_rows([[1] * len(r.token_ids) for r in rows], width=width, value=0, dtype=torch.bool),
        action_mask=action_mask,
        index=torch.tensor(list(indices), dtype=torch.long),
        rollout_logprobs=logprobs.masked_fill(~action_mask, 0.0),
        versions=versions.masked_fill(~action_mask, -1),
        rewards=torch.tensor(list(rewards), dtype=torch.float32),
        turn_rewards=_at_turn_ends(rows, rewards, turn_rewards, width),
        temperatures=_temperatures(rows, width),
        extra=_images(rows, image_processor),
    )


def load_batch(
    shares: Sequence[Sequence[SampleRef]],
    trajectories: Sequence[Trajectory],
    *,
    max_len: int,
    pad_token_id: int,
    image_processor: ImageTensors | None,
) -> RankBatch:
    """A rank's samples as they came, by mini-batch. trajectories: of each of them. The rest as `build_batch`."""
    samples = [sample for share in shares for sample in share]
    positions = iter(range(len(samples)))
    rows = [[next(positions) for _ in share] for share in shares]
    batch = build_batch(
        trajectories,
        indices=[s.index for s in samples],
        rewards=[s.reward for s in samples],
        turn_rewards=[s.turn_rewards for s in samples],
        max_len=max_len,
        pad_token_id=pad_token_id,
        image_processor=image_processor,
    )
    origins = [Origin.of(t, s, max_len) for t, s in zip(trajectories, samples, strict=True)]
    return RankBatch(batch=batch, rows=rows, origins=origins)


def _temperatures(rows: Sequence[Trajectory], width: int) -> Tensor | None:
    """Of tokens that were sampled at another temperature than the run's, [B, T], 0 elsewhere; None: there are none."""
    if all(turn.temperature is None for row in rows for turn in row.turns):
        return None
    out = torch.zeros(len(rows), width, dtype=torch.float32)
    for number, row in enumerate(rows):
        for turn in row.turns:
            out[number, turn.start : turn.end] = turn.temperature or 0.0
    return out


def _at_turn_ends(
    rows: Sequence[Trajectory], rewards: Sequence[float], turns: Sequence[Sequence[float] | None], width: int
) -> Tensor | None:
    """Rewards at the last trainable token of every turn that has one, [B, T]; of a sample without rewards of its turns
    at its very last one. None where no sample has them."""
    if all(found is None for found in turns):
        return None
    out = torch.zeros(len(rows), width, dtype=torch.float32)
    for number, (row, reward, found) in enumerate(zip(rows, rewards, turns, strict=True)):
        places = [t for t, own in enumerate(row.trainable) if own]
        ends = [places[-1]] if found is None else [e for t in row.turns if (e := _last(row.trainable, t)) is not None]
        out[number, ends] = torch.tensor([reward] if found is None else list(found), dtype=torch.float32)
    return out


def _last(trainable: Sequence[int], turn: Turn) -> int | None:
    return next((t for t in reversed(range(turn.start, turn.end)) if trainable[t]), None)


def _images(rows: Sequence[Trajectory], processor: ImageTensors | None) -> dict[str, list[Any]] | None:
    if not any(row.images for row in rows):
        return None
    if processor is None:
        raise ValueError(
            "samples come with images, but --actor.model_name_or_path is no vision-language model (its configuration "
            "has no vision_config)"
        )
    return image_rows([row.images for row in rows], processor)


def gather_trainable(batch: Batch, per_token: Tensor | None) -> dict[int, Tensor]:
    """[B, T] -> {sample index: [its trainable tokens]}."""
    assert per_token is not None
    return {
        int(index): per_token[row][batch.action_mask[row]].clone() for row, index in enumerate(batch.index.tolist())
    }


def scatter_trainable(batch: Batch, parts: Sequence[PerSample]) -> Tensor:
    """{sample index: [its trainable tokens]} from any number of ranks -> [B, T], 0 elsewhere."""
    merged: dict[int, Tensor] = {}
    for part in parts:
        merged.update(part)
    out = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    for row, index in enumerate(batch.index.tolist()):
        out[row][batch.action_mask[row]] = merged[int(index)].to(torch.float32)
    return out


def told_rows(batch: Batch, parts: Sequence[ToldPerSample]) -> list[dict[str, Tensor]]:
    """What a teacher's ranks, any number of them, say of the rows of `batch`."""
    merged = {index: told for part in parts for index, told in part.items()}
    return [dict(merged[int(index)]) for index in batch.index.tolist()]


def prepared_sums(batch: Batch, rewards: Tensor, kl: Tensor | None) -> Sums:
    """Sums over this rank: KL per token, return per sample, moments and extremes of the advantages, and the entropy as
    the engine's log-probs of what it sampled tell it.

    The KL is 0 without a reference model; with the KL or a divergence as a loss `update` measures it.
    """
    mask = batch.action_mask
    assert batch.advantages is not None
    tokens = float(mask.sum())
    chosen = batch.advantages[mask].double()
    sums: Sums = {
        "train/return": (float(rewards.sum()), float(batch.size)),
        "train/advantage_mean": (float(chosen.sum()), tokens),
        "advantage_square": (float((chosen * chosen).sum()), tokens),
        "train/advantage_min": (float(chosen.min()) if len(chosen) else float("inf"), 1.0),
        "train/advantage_max": (float(chosen.max()) if len(chosen) else float("-inf"), 1.0),
    }
    if batch.rollout_logprobs is not None:
        sums["rollout/entropy"] = (-float(batch.rollout_logprobs[mask].sum()), tokens)
    if kl is not None:
        sums["train/kl"] = (float(kl.sum()), tokens)
    elif batch.ref_logprobs is None and batch.teacher is None:
        sums["train/kl"] = (0.0, tokens)
    return sums


OPTIMISER_METRICS = {"policy": "actor_", "critic": "critic_"}
"""lr and grad_norm of both models are told apart by their entity."""


def metric_names(sums: Sums, role: str) -> Sums:
    """The learner's metric names -> those of the dashboards; skipped steps become their number, not their share."""
    prefix = OPTIMISER_METRICS[role]
    sums = {name: (value, 1.0 if name == "skipped_steps" else count) for name, (value, count) in sums.items()}
    own = {"lr", "grad_norm"} if role == "policy" else {"lr", "grad_norm", "skipped_steps"}
    return {f"train/{prefix if name in own else ''}{name}": value for name, value in sums.items()}


def add_sums(total: Sums, more: Mapping[str, tuple[float, float]]) -> None:
    """Add (sum, count) metrics into `total`."""
    for name, (value, count) in more.items():
        old = total.get(name, (0.0, 0.0))
        total[name] = (old[0] + float(value), old[1] + float(count))


def combine_sums(ranks: Sequence[Sums]) -> dict[str, float]:
    """Means over ranks of (sum, count) metrics; advantage extremes and std by their own rules."""
    total: Sums = {}
    for sums in ranks:
        add_sums(total, sums)
    out = {name: value / count for name, (value, count) in total.items() if count > 0}
    square = out.pop("advantage_square", None)
    if square is not None:
        out["train/advantage_std"] = max(square - out["train/advantage_mean"] ** 2, 0.0) ** 0.5
        out["train/advantage_min"] = min(s["train/advantage_min"][0] for s in ranks)
        out["train/advantage_max"] = max(s["train/advantage_max"][0] for s in ranks)
    return out
