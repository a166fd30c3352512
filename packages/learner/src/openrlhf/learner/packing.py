"""From a `Batch` to what a model is called with: padded rows, or one packed row.

Packing rule of transformers 5: attention_mask=None, position_ids that restart at 0 for each sample, use_cache=False.
Anything else attends across samples without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.batch import Batch


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One micro-batch, ready for the model.

    input_ids, position_ids: [R, L] int64; R = 1 when packed.
    select: [N] int64, numbers of the hidden states to read, counted over the flattened [R, L].
    targets: [N] int64, the token each of them predicts.
    rows, cols: [N] int64, where the results belong in [B, T].
    token_mask: [R, L] bool, False on padding.
    images: the model's inputs beside the tokens (pixel_values, ...), of all images of the rows in order.
    """

    input_ids: Tensor
    position_ids: Tensor
    select: Tensor
    targets: Tensor
    rows: Tensor
    cols: Tensor
    token_mask: Tensor
    images: dict[str, Tensor] | None = None

    def scatter(self, values: Tensor, shape: torch.Size) -> Tensor:
        """[N] results to [B, T], 0 elsewhere; differentiable."""
        return values.new_zeros(shape).index_put((self.rows, self.cols), values)


def build_inputs(batch: Batch, positions: Tensor, *, packed: bool) -> ModelInputs:
    """Inputs that read one hidden state for every True in `positions`.

    positions: [B, T] bool. True at t asks for the state that predicts token t (it sits at t - 1); t = 0 is not allowed.
    Without any True the state of the first token is read, so that forward and backward still run through the whole
    model; its result lands at [0, 0], which is never trainable.
    """
    assert not positions[:, 0].any(), "token 0 has no prefix that could predict it"
    rows, cols = positions.nonzero(as_tuple=True)
    if rows.numel() == 0:
        rows = cols = torch.zeros(1, dtype=torch.long, device=positions.device)
    return _inputs(batch, rows, cols, (cols - 1).clamp(min=0), packed=packed)


def build_last_token_inputs(batch: Batch, *, packed: bool) -> ModelInputs:
    """Inputs that read the state of every row's last real token; results land at [b, 0]."""
    rows = torch.arange(batch.size, device=batch.tokens.device)
    return _inputs(batch, rows, torch.zeros_like(rows), (batch.lengths - 1).clamp(min=0), packed=packed)


def _inputs(batch: Batch, rows: Tensor, cols: Tensor, states: Tensor, *, packed: bool) -> ModelInputs:
    size, width = batch.tokens.shape
    device = batch.tokens.device
    position_ids = torch.arange(width, device=device).expand(size, width)
    input_ids, mask = batch.tokens, batch.attention_mask
    if packed:
        lengths = batch.lengths
        starts = lengths.cumsum(0) - lengths
        select = starts[rows] + states
        input_ids, position_ids = input_ids[mask][None], position_ids[mask][None]
        token_mask = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        select = rows * width + states
        token_mask = mask
    images = join_images(batch.extra, device)
    assert images is None or not packed, "a packed row would lose the places of its images"
    return ModelInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        select=select,
        targets=batch.tokens[rows, cols],
        rows=rows,
        cols=cols,
        token_mask=token_mask,
        images=images,
    )


def join_images(extra: dict[str, Any] | None, device: torch.device) -> dict[str, Tensor] | None:
    """Per-row tensors (None for a row without images) -> one tensor per input, joined along the first dimension."""
    if extra is None:
        return None
    present = {name: [t for t in rows if t is not None] for name, rows in extra.items()}
    return {name: torch.cat(tensors).to(device) for name, tensors in present.items() if tensors} or None
