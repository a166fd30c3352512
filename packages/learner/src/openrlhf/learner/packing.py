"""From a `Batch` to what a model is called with: padded rows, one packed row, or one row with shared beginnings.

Packing rule of transformers 5: attention_mask=None, position_ids that restart at 0 for each sample, use_cache=False.
Anything else attends across samples without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.truncation import KeptTokens
from openrlhf.learner.batching import Family
from openrlhf.learner.sequence_parallel.group import SequenceGroup
from openrlhf.learner.sequence_parallel.slicing import Shares, Slices
from openrlhf.learner.sharing import SharedLayout, lay_out


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One micro-batch, ready for the model.

    input_ids, position_ids: [R, L] int64; R = 1 when packed or shared.
    select: [N] int64, numbers of the hidden states to read, counted over the flattened [R, L]. A shared state is read
    for every row that it belongs to.
    targets: [N] int64, the token each of them predicts.
    rows, cols: [N] int64, where the results belong in [B, T].
    token_weights: [R, L] of how many samples each token is one: 0 (padding) or 1, and more where samples share it.
    images: the model's inputs beside the tokens (pixel_values, ...), of all images of the rows in order.
    kept: the N sets that log-probs are over, of a batch that has them.
    temperatures: [N] of the targets that were sampled at another than the run's, else 0.
    unread: how many of the last results belong to no row of the batch (see `with_probe`).
    shared: how samples share their beginnings; None: they do not.
    slices: how the row is cut over ranks, of which this has one part (`cut_over`); None: it is whole.
    """

    input_ids: Tensor
    position_ids: Tensor
    select: Tensor
    targets: Tensor
    rows: Tensor
    cols: Tensor
    token_weights: Tensor
    images: dict[str, Tensor] | None = None
    kept: KeptTokens | None = None
    temperatures: Tensor | None = None
    unread: int = 0
    shared: SharedLayout | None = None
    slices: Slices | None = None

    def scatter(self, values: Tensor, shape: torch.Size) -> Tensor:
        """[N] results to [B, T], 0 elsewhere; differentiable."""
        n = len(values) - self.unread
        return values.new_zeros(shape).index_put((self.rows[:n], self.cols[:n]), values[:n])


def build_inputs(
    batch: Batch, positions: Tensor, *, packed: bool, families: Sequence[Family] | None = None
) -> ModelInputs:
    """Inputs that read one hidden state for every True in `positions`.

    positions: [B, T] bool. True at t asks for the state that predicts token t (it sits at t - 1); t = 0 is not allowed.
    Without any True the state of the first token is read, so that forward and backward still run through the whole
    model; its result lands at [0, 0], which is never trainable.
    families: rows that begin alike (`sharing.find_families`): what they share is computed once, in one row.
    """
    assert not positions[:, 0].any(), "token 0 has no prefix that could predict it"
    rows, cols = positions.nonzero(as_tuple=True)
    kept = None if batch.kept is None else KeptTokens.joined(batch.kept).to(positions.device)
    if rows.numel() == 0:
        rows = cols = torch.zeros(1, dtype=torch.long, device=positions.device)
        kept = None
    assert kept is None or len(kept.counts) == len(rows), "a batch's kept sets are those of its action tokens"
    states = (cols - 1).clamp(min=0)
    temperatures = None if batch.temperatures is None else batch.temperatures[rows, cols]
    inputs = _inputs(batch, rows, cols, states, packed=packed, families=families)
    return replace(inputs, kept=kept, temperatures=temperatures)


def build_last_token_inputs(batch: Batch, *, packed: bool, families: Sequence[Family] | None = None) -> ModelInputs:
    """Inputs that read the state of every row's last real token; results land at [b, 0]."""
    rows = torch.arange(batch.size, device=batch.tokens.device)
    states = (batch.lengths - 1).clamp(min=0)
    return _inputs(batch, rows, torch.zeros_like(rows), states, packed=packed, families=families)


def _inputs(
    batch: Batch, rows: Tensor, cols: Tensor, states: Tensor, *, packed: bool, families: Sequence[Family] | None
) -> ModelInputs:
    if families is not None:
        return _shared_inputs(batch, rows, cols, states, lay_out(batch, families))
    size, width = batch.tokens.shape
    device = batch.tokens.device
    position_ids = torch.arange(width, device=device).expand(size, width)
    input_ids, mask = batch.tokens, batch.attention_mask
    if packed:
        lengths = batch.lengths
        starts = lengths.cumsum(0) - lengths
        select = starts[rows] + states
        input_ids, position_ids = input_ids[mask][None], position_ids[mask][None]
        token_weights = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        select = rows * width + states
        token_weights = mask
    images = join_images(batch.extra, device)
    assert images is None or not packed, "a packed row would lose the places of its images"
    return ModelInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        select=select,
        targets=batch.tokens[rows, cols],
        rows=rows,
        cols=cols,
        token_weights=token_weights,
        images=images,
    )


def _shared_inputs(batch: Batch, rows: Tensor, cols: Tensor, states: Tensor, layout: SharedLayout) -> ModelInputs:
    assert not has_images(batch), "a shared row would lose the places of its images"
    return ModelInputs(
        input_ids=batch.tokens.flatten()[layout.cells][None],
        position_ids=layout.positions[None],
        select=layout.place(rows, states),
        targets=batch.tokens[rows, cols],
        rows=rows,
        cols=cols,
        token_weights=layout.weights[None],
        shared=layout,
    )


def with_probe(batch: Batch, probe: Batch) -> ModelInputs:
    """Padded inputs that read every action token of a batch without images, and one token of `probe`, a row with one.

    The probe's result is not scattered and gets a gradient of exactly 0. It makes the model visit its vision encoder:
    ranks reduce gradients (and under ZeRO-3 gather weights) module by module, so all must visit the same modules.
    """
    (size, width), length = batch.tokens.shape, probe.tokens.shape[1]
    pad = (0, max(length - width, 0))
    fill = (0, max(width - length, 0))

    def stack(own: Tensor, others: Tensor) -> Tensor:
        return torch.cat([torch.nn.functional.pad(own, pad), torch.nn.functional.pad(others, fill).to(own.device)])

    extended = Batch(
        tokens=stack(batch.tokens, probe.tokens),
        attention_mask=stack(batch.attention_mask, probe.attention_mask),
        action_mask=stack(batch.action_mask, probe.action_mask),
        index=torch.cat([batch.index, probe.index.to(batch.index.device)]),
        temperatures=None if batch.temperatures is None else stack(batch.temperatures, torch.zeros(probe.tokens.shape)),
        kept=None if batch.kept is None else [*batch.kept, KeptTokens.whole(int(probe.action_mask.sum()))],
        extra=None if probe.extra is None else {k: [None] * size + v for k, v in probe.extra.items()},
    )
    return replace(build_inputs(extended, extended.action_mask, packed=False), unread=1)


def cut_over(inputs: ModelInputs, group: SequenceGroup) -> tuple[ModelInputs, Shares]:
    """This rank's part of a packed row and the readings at its tokens, and which rank has which of all readings.

    Position ids stay those in the samples; token_weights stay those of the whole row, with its filling.
    """
    slices, device = Slices.of(inputs.position_ids, group), inputs.input_ids.device
    readings, tokens = Shares(slices.owner(inputs.select), group), slices.tokens(device)
    filling = torch.arange(2 * group.size, device=device)
    lacking = slices.length - inputs.input_ids.shape[1]
    part = replace(
        inputs,
        input_ids=slices.cut(inputs.input_ids, torch.zeros_like(filling)),
        position_ids=slices.cut(inputs.position_ids, filling),
        select=tokens.within[inputs.select[readings.mine]],
        targets=inputs.targets[readings.mine],
        temperatures=None if inputs.temperatures is None else inputs.temperatures[readings.mine],
        token_weights=torch.nn.functional.pad(inputs.token_weights, (0, lacking)),
        slices=slices,
    )
    return part, readings


def has_images(batch: Batch) -> bool:
    """Whether any row comes with images."""
    return batch.extra is not None and any(t is not None for rows in batch.extra.values() for t in rows)


def join_images(extra: dict[str, Any] | None, device: torch.device) -> dict[str, Tensor] | None:
    """Per-row tensors (None for a row without images) -> one tensor per input, joined along the first dimension."""
    if extra is None:
        return None
    present = {name: [t for t in rows if t is not None] for name, rows in extra.items()}
    return {name: torch.cat(tensors).to(device) for name, tensors in present.items() if tensors} or None


def placeholder() -> Batch:
    """One row that trains nothing, for a rank that has run out of samples."""
    return Batch(
        tokens=torch.zeros(1, 2, dtype=torch.long),
        attention_mask=torch.ones(1, 2, dtype=torch.bool),
        action_mask=torch.zeros(1, 2, dtype=torch.bool),
        index=torch.full((1,), -1),
    )
