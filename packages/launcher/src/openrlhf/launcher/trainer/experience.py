"""The tensor border: trajectories (lists) become a `Batch` (tensors). Lists before it, tensors after it.

Nothing is computed here that learns: no advantage, no baseline; rewards come in shaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from openrlhf.agents.types import Trajectory
from openrlhf.core.batch import Batch, pad_rows
from openrlhf.launcher.trainer.images import ImageTensors, image_rows
from openrlhf.launcher.trainer.samples import cut


def build_batch(
    trajectories: Sequence[Trajectory],
    *,
    indices: Sequence[int],
    rewards: Sequence[float],
    max_len: int,
    pad_token_id: int = 0,
    image_processor: ImageTensors | None = None,
) -> Batch:
    """Samples as a right-padded `Batch` of [B, T], T = the longest of them, at most `max_len`.

    trajectories: B samples, none of them failed. indices: their numbers in the rollout batch. rewards: shaped, after
    the baseline. Tokens beyond `max_len` are cut off with everything that belongs to them.
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
        extra=_images(rows, image_processor),
    )


def _images(rows: Sequence[Trajectory], processor: ImageTensors | None) -> dict[str, list[Any]] | None:
    if not any(row.images for row in rows):
        return None
    if processor is None:
        raise ValueError(
            "samples come with images, but --actor.model_name_or_path is no vision-language model (its configuration "
            "has no vision_config)"
        )
    return image_rows([row.images for row in rows], processor)
