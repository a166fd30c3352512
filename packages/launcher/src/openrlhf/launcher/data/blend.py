"""Several sources as one: `max_samples`, concatenation, or interleaving by probabilities until all are exhausted.

The `datasets` library does the same with tables of its own. Here it is done with row numbers, since rows of JSON are no
tables (see `rows`) and loading that library takes 4 s, which a run on JSON is spared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openrlhf.agents.environments import EnvironmentTable

log = logging.getLogger(__name__)

_DRAWS_PER_ROW_LIMIT = 1000  # a probability so small that its source would need more draws per row is refused


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Which row of which source stands at each place: source [N] int32, row [N] int64.

    kind: [N] int32, the environment of each by its place in the table; None: there are none.
    """

    source: np.ndarray
    row: np.ndarray
    kind: np.ndarray | None = None

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


def by_ratios(plan: Blend, kind: np.ndarray, table: EnvironmentTable, *, most: int, flag: str, training: bool) -> Blend:
    """The plan with the prompts of every environment as often as its ratio asks for. kind: [N], their environments.

    Without ratios, and for an evaluation, all prompts stay as they are. ValueError where an environment with a ratio
    has no prompt; one without is named in the log.
    """
    at = [np.flatnonzero(kind == k) for k in range(len(table.environments))]
    ratios = [e.ratio for e in table.environments if e.ratio is not None]
    for environment, places in zip(table.environments, at, strict=True):
        if training and not len(places):
            what = f"{flag}: no row is of environment {environment.name!r} (field {table.column!r}) of {table.file}"
            if ratios:
                raise ValueError(f"{what}, which has a ratio")
            log.warning("%s", what)
    if training and ratios:
        counts = quotas([len(places) for places in at], ratios, most=most)
        chosen = np.concatenate([np.resize(places, count) for places, count in zip(at, counts, strict=True)])
        plan, kind = Blend(source=plan.source[chosen], row=plan.row[chosen]), kind[chosen]
    return Blend(source=plan.source, row=plan.row, kind=kind)


def quotas(sizes: Sequence[int], ratios: Sequence[float], *, most: int) -> list[int]:
    """How many prompts of each environment an episode has: shares exact to one prompt, none shorter than its data.

    So all prompts of the environment that is short of them come once, those of others more than once where they have
    to. The rest goes to the largest remainders. most: prompts in all (`--data.max_samples`).
    """
    shares = [ratio / sum(ratios) for ratio in ratios]
    length = min(max(int(np.ceil(size / share - 1e-9)) for size, share in zip(sizes, shares, strict=True)), most)
    exact = [length * share for share in shares]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])
    for k in by_rest[: length - sum(counts)]:
        counts[k] += 1
    return counts


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
