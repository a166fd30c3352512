"""The check after every weight push: trainer and engine score the same text and must agree.

Pure Python: who computes the scores is the launcher's business. Catches whatever a push can lose without an error: a
weight that never arrived, a stale copy in the engine, two weights exchanged, another temperature, another number
format.

In float32 both sides agree to 1e-5 and the tolerance is a number. In half precision they never agree: every layer
rounds, each side in its own order, and how far that moves a log-prob depends on the model. There the trainer itself
says what rounding does: it scores the text again with the output of every layer rounded to one bit less. (Its other
layouts say nothing: kernels that sum in one fixed order give the same bits for every batch size.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

CHECK_ROWS = 16
PROMPT_TOKENS = 32
"""Of each prompt."""
ANSWER_TOKENS = 32
"""What the engine writes after each prompt, at most."""
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
FP32_TOLERANCE = 1e-3
NOISE_FACTOR = 2.0
"""Largest mean difference of a sound push, in units of what one bit less in every layer does; two independent roundings
per layer give 0.6."""
NOISE_FACTOR_RMS = 2.5
"""The same of the root mean square, which sees a few tokens that are far off (an expert that few of them go to)."""
LEAST_TOLERANCE = 2e-3
"""For a model so sure of the text that rounding hardly moves its log-probs."""
BLIND_TOLERANCE = 0.05
"""When one bit less moves nothing, so that nothing was measured: layers that are compiled into one kernel."""


FEW_TOKENS_FACTOR = 3.0
"""What the mean over a few tokens may exceed a measured tolerance by, which is for a mean over hundreds."""
WRITTEN_ROWS = 8
"""Rows after which an engine that serves an adapter samples some tokens, to be compared; a quarter where both sides
agree to rounding."""


class SyncError(RuntimeError):
    """An engine does not compute what the trainer computes."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What a sound push may differ by.

    value: largest mean |log-prob difference|. rms: largest root mean square of the differences; None: any.
    source: where the numbers come from, in words.
    """

    value: float
    source: str
    rms: float | None = None


def check_sequences(vocab_size: int, rows: int = 4, tokens: int = 16) -> list[list[int]]:
    """Fixed token sequences, the same in every run: `rows` lists of `tokens` ids, for models without any text.

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


def check_prompts(prompts: Sequence[Sequence[int]], *, max_len: int, without: Collection[int] = ()) -> list[list[int]]:
    """Beginnings of the check's text, from tokenised prompts of the run.

    A long prompt keeps its first token, which begins a text, and its last ones. Half of `max_len` is left for the
    answer. without: ids that stand for images. A prompt without any other token is left out.
    """
    limit = max(1, min(PROMPT_TOKENS, (max_len - 1) // 2))
    texts = [[token for token in prompt if token not in without] for prompt in prompts]
    return [ids if len(ids) <= limit else [ids[0], *ids[len(ids) - limit + 1 :]] for ids in texts if ids]


def answer_tokens(prompts: Sequence[Sequence[int]], *, max_len: int) -> int:
    """How many tokens the engine may add to each prompt. One place is left: an engine samples when it scores."""
    return max(1, min(ANSWER_TOKENS, max_len - 1 - max(map(len, prompts))))


def noise_bits(*dtypes: str) -> int | None:
    """To how many significant bits the trainer rounds its layers to measure the noise; None: float32 everywhere.

    One less than the coarsest of the number formats of trainer and engine.
    """
    bits = min(SIGNIFICANT_BITS[dtype] for dtype in dtypes)
    return None if bits == SIGNIFICANT_BITS["float32"] else bits - 1


def measured_tolerance(own: Sequence[Sequence[float]], rounded: Sequence[Sequence[float]], *, bits: int) -> Tolerance:
    """The tolerance of these weights, from the trainer's log-probs as they are and with its layers rounded to `bits`.

    Raises SyncError when the trainer's log-probs are not finite.
    """
    noise, rms = mean_difference(own, rounded), rms_difference(own, rounded)
    if not math.isfinite(noise):
        raise SyncError("sync check: the trainer's own log-probs are not finite, so there is nothing to compare with")
    if noise == 0:
        return Tolerance(value=BLIND_TOLERANCE, source=f"rounding the trainer's layers to {bits} bits moved nothing")
    source = f"{NOISE_FACTOR:g} x {noise:.3g}, which is what rounding its layers to {bits} bits does to the trainer"
    if NOISE_FACTOR * noise < LEAST_TOLERANCE:
        source = f"the least in half precision; {source}"
    value, largest_rms = (max(n, LEAST_TOLERANCE) for n in (NOISE_FACTOR * noise, NOISE_FACTOR_RMS * rms))
    return Tolerance(value=value, rms=largest_rms, source=source)


def few_tokens(tolerance: Tolerance) -> Tolerance:
    """The tolerance of a mean over a few tokens: the same where both sides agree to rounding."""
    if tolerance.value <= FP32_TOLERANCE:
        return tolerance
    source = f"{FEW_TOKENS_FACTOR:g} times that of the whole text: {tolerance.source}"
    return Tolerance(value=FEW_TOKENS_FACTOR * tolerance.value, source=source)


def written_rows(tolerance: Tolerance) -> int:
    """After how many rows tokens are sampled."""
    return WRITTEN_ROWS // 4 if tolerance.value <= FP32_TOLERANCE else WRITTEN_ROWS


def mean_difference(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """Mean |difference| of two scorings in nats, over all tokens but each row's first, which has no prefix."""
    found = _differences(first, second)
    return math.fsum(found) / len(found)


def rms_difference(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """Root mean square of the same differences."""
    found = _differences(first, second)
    return math.sqrt(math.fsum(d * d for d in found) / len(found))


def _differences(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> list[float]:
    return [abs(a - b) for one, two in zip(first, second, strict=True) for a, b in zip(one[1:], two[1:], strict=True)]


def compare(
    trainer: Sequence[Sequence[float]], engine_scores: Sequence[Sequence[float]], *, tolerance: Tolerance, engine: str
) -> float:
    """`mean_difference` of trainer and engine.

    Raises SyncError above the tolerance or for a number that is not finite, ValueError for other lengths.
    """
    if [len(r) for r in trainer] != [len(r) for r in engine_scores]:
        raise ValueError(
            f"sync check of {engine}: {[len(r) for r in trainer]} tokens from the trainer, "
            f"{[len(r) for r in engine_scores]} from the engine"
        )
    mean, rms = mean_difference(trainer, engine_scores), rms_difference(trainer, engine_scores)
    if mean <= tolerance.value and (tolerance.rms is None or rms <= tolerance.rms):
        return mean
    places = [(row, position) for row, values in enumerate(trainer) for position in range(1, len(values))]
    differences = _differences(trainer, engine_scores)
    worst = max(range(len(places)), key=lambda i: differences[i] if math.isfinite(differences[i]) else math.inf)
    row, position = places[worst]
    squares = "" if tolerance.rms is None else f"; root mean square {rms:.3g}, allowed {tolerance.rms:.3g}"
    raise SyncError(
        f"after the weight push {engine} does not compute what the trainer computes: mean |log-prob difference| "
        f"{mean:.3g} over {len(places)} tokens, allowed {tolerance.value:.3g} ({tolerance.source}){squares}; "
        f"largest at sequence {row}, token {position}: trainer {trainer[row][position]:.6g}, engine "
        f"{engine_scores[row][position]:.6g}. A weight is missing, stale or in the wrong place in the engine, or "
        "`engine.engine_args` change what it computes: leave them out, and try out pushes on this machine "
        "(`openrlhf-launch selfcheck`). A wanted difference, as of a quantised engine, is allowed by `sync_tolerance`"
    )
