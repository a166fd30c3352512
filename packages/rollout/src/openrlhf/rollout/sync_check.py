"""The check after every weight push: trainer and engine score the same fixed tokens and must agree.

Pure Python: who computes the scores is the launcher's business. Catches whatever a push can lose without an error: a
weight that never arrived, a stale copy in the engine, another temperature, another number format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CHECK_ROWS = 4
CHECK_TOKENS = 16


class SyncError(RuntimeError):
    """An engine does not compute what the trainer computes."""


def check_sequences(vocab_size: int, rows: int = CHECK_ROWS, tokens: int = CHECK_TOKENS) -> list[list[int]]:
    """Fixed token sequences, the same in every run: `rows` lists of `tokens` ids.

    Ids lie in the middle of the vocabulary: special tokens (which image models give a meaning) sit at its ends.
    """
    low = vocab_size // 8
    width = max(vocab_size // 2, 1)
    state = 12345
    sequences = []
    for _ in range(rows):
        row = []
        for _ in range(tokens):
            state = (1103515245 * state + 12345) % (1 << 31)  # the C standard's example generator
            row.append(low + (state >> 8) % width)
        sequences.append(row)
    return sequences


def default_tolerance(dtype: str) -> float:
    """What `--vllm.sync_tolerance` is when not given: 1e-3 in float32, 0.05 in half precision."""
    return 1e-3 if dtype in ("float32", "fp32") else 0.05


def compare(
    trainer: Sequence[Sequence[float]], engine_scores: Sequence[Sequence[float]], *, tolerance: float, engine: str
) -> float:
    """Mean absolute difference of the log-probs (nats) over all tokens but each row's first, which has no prefix.

    Raises SyncError above the tolerance or for a number that is not finite, ValueError for other lengths.
    """
    if [len(r) for r in trainer] != [len(r) for r in engine_scores]:
        raise ValueError(
            f"sync check of {engine}: {[len(r) for r in trainer]} tokens from the trainer, "
            f"{[len(r) for r in engine_scores]} from the engine"
        )
    places = [(row, position) for row, values in enumerate(trainer) for position in range(1, len(values))]
    differences = [abs(trainer[row][position] - engine_scores[row][position]) for row, position in places]
    mean = sum(differences) / len(differences)
    if mean <= tolerance:
        return mean
    worst = max(range(len(places)), key=lambda i: differences[i] if math.isfinite(differences[i]) else math.inf)
    row, position = places[worst]
    raise SyncError(
        f"after the weight push {engine} does not compute what the trainer computes: mean |log-prob difference| "
        f"{mean:.3g} over {len(places)} tokens, allowed {tolerance:.3g} (`sync_tolerance`); largest at sequence "
        f"{row}, token {position}: trainer {trainer[row][position]:.6g}, engine {engine_scores[row][position]:.6g}"
    )
