"""Which rows of a rank's batch a forward pass takes, as its spec says: by number or by tokens, families together."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.core.batch import Batch
from openrlhf.learner.batching import (
    Family,
    family_micro_batches,
    family_token_micro_batches,
    fixed_micro_batches,
    padded_micro_batches,
    token_micro_batches,
)
from openrlhf.learner.sharing import worthwhile_families
from openrlhf.learner.spec import LearnerSpec


def score_plan(spec: LearnerSpec, batch: Batch, *, shared: bool, hidden_size: int) -> list[list[int]]:
    """Micro-batches of `Learner.score`. shared: whether what rows have in common at their beginning counts once."""
    budget = spec.score_max_tokens or spec.batch.max_tokens_per_gpu
    families = worthwhile_families(batch) if shared else None
    return _rows(spec, batch, families, spec.score_micro_batch_size, budget, hidden_size)


def update_plan(
    spec: LearnerSpec, batch: Batch, rows_per_unit: int, *, shared: bool, hidden_size: int
) -> list[list[int]]:
    """Micro-batches of `Learner.update`. Rows that belong together stay together; their sizes count units."""
    size, budget = spec.batch.micro_batch_size, spec.batch.max_tokens_per_gpu
    if rows_per_unit == 1:
        families = worthwhile_families(batch) if shared else None
        return _rows(spec, batch, families, size, budget, hidden_size)
    rows = batch.lengths.view(batch.size // rows_per_unit, rows_per_unit)
    tokens = rows.sum(-1) if spec.packed else rows.amax(-1) * rows_per_unit
    plan = _by_lengths(spec, tokens.tolist(), size, budget, hidden_size)
    return [[unit * rows_per_unit + row for unit in part for row in range(rows_per_unit)] for part in plan]


def _rows(
    spec: LearnerSpec, batch: Batch, families: Sequence[Family] | None, size: int, max_tokens: int, hidden_size: int
) -> list[list[int]]:
    lengths = batch.lengths.tolist()
    if families is None:
        return _by_lengths(spec, lengths, size, max_tokens, hidden_size)
    if not spec.batch.dynamic_batch_enable:
        return family_micro_batches(families, lengths, size)
    budget = max_tokens * spec.ds.ranks_per_sample
    return family_token_micro_batches(families, lengths, budget, hidden_size=hidden_size)


def _by_lengths(spec: LearnerSpec, lengths: list[int], size: int, max_tokens: int, hidden_size: int) -> list[list[int]]:
    if not spec.batch.dynamic_batch_enable:
        return fixed_micro_batches(lengths, size)
    budget = max_tokens * spec.ds.ranks_per_sample
    if not spec.packed:
        return padded_micro_batches(lengths, budget)
    return token_micro_batches(lengths, budget, hidden_size=hidden_size)
