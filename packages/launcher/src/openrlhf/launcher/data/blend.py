"""Several sources as one: `max_samples`, concatenation, or interleaving by probabilities until all are exhausted.

The `datasets` library does the same with tables of its own. Here it is done with row numbers, since rows of JSON are no
tables (see `rows`) and loading that library takes 4 s, which a run on JSON is spared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS_PER_ROW_LIMIT = 1000  # a probability so small that its source would need more draws per row is refused


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Which row of which source stands at each place: source [N] int32, row [N] int64."""

    source: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.row)


def blend(sizes: Sequence[int], *, probs: Sequence[float] | None, max_samples: int, seed: int) -> Blend:
    """Mix sources of these sizes. `max_samples` caps each source first and then the whole."""
    sizes = [min(n, max_samples) for n in sizes]
    if probs is None or len(sizes) == 1:
        source = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        row = np.concatenate([np.arange(n, dtype=np.int64) for n in sizes])
    else:
        source = _draw_until_all_exhausted(sizes, probs, seed)
        row = np.empty(len(source), dtype=np.int64)
        for k, n in enumerate(sizes):
            at = np.flatnonzero(source == k)
            row[at] = np.arange(len(at)) % max(n, 1)
    return Blend(source=source[:max_samples], row=row[:max_samples])


def _draw_until_all_exhausted(sizes: Sequence[int], probs: Sequence[float], seed: int) -> np.ndarray:
    """Draw sources by probability until every source was read to its end; a source that ended starts again."""
    if 0 in sizes:
        raise ValueError(f"cannot mix by probabilities: dataset number {list(sizes).index(0) + 1} has no rows")
    rng = np.random.default_rng(seed)
    chunk = max(1024, sum(sizes))
    parts: list[np.ndarray] = []
    counts = np.zeros(len(sizes), dtype=np.int64)
    while (counts < sizes).any():
        draw = rng.choice(len(sizes), size=chunk, p=probs).astype(np.int32)
        parts.append(draw)
        counts += np.bincount(draw, minlength=len(sizes))
        if len(parts) > _DRAWS_PER_ROW_LIMIT:
            raise ValueError(f"probabilities {list(probs)} are too uneven for datasets of {list(sizes)} rows")
    drawn = np.concatenate(parts)
    end = max(int(np.flatnonzero(drawn == k)[n - 1]) for k, n in enumerate(sizes))
    return drawn[: end + 1]
