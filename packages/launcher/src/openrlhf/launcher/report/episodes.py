"""The episodes of a step as one compressed block, which the page unpacks when somebody looks at it.

A block is gzip of: the length of its header (4 bytes, little-endian), the header as JSON (ASCII, so that any text of a
model survives), then columns of numbers, one after the other, each padded to 8 bytes. The header says where each lies.
`page/source.js` is the reader.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.record.schema import RecordedGroup, RecordedSample

LEVEL = 5
"""Of gzip: more costs twice the time for a twentieth of the size."""
KEPT_BITS = 11
"""Bits of the mantissa that a number of a token keeps: three digits, as far as colours and hover values need."""
PLACES = 8
"""Columns begin at multiples of so many bytes, where a browser can read numbers of every size."""


@dataclass
class Columns:
    """Arrays of numbers one after the other, and where each lies."""

    parts: list[bytes] = field(default_factory=list)
    places: dict[str, Any] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, values: NDArray[Any]) -> None:
        """A column; name: of the place that the header gives it."""
        self.places[name] = [values.dtype.str[1:], self.size, len(values)]
        self._append(values.tobytes())

    def add_file(self, name: str, content: bytes) -> None:
        """The contents of a file."""
        self.places[name] = ["file", self.size, len(content)]
        self._append(content)

    def _append(self, content: bytes) -> None:
        padded = content + b"\0" * (-len(content) % PLACES)
        self.parts.append(padded)
        self.size += len(padded)


def step_block(
    record: Record,
    groups: Sequence[RecordedGroup],
    samples: Sequence[RecordedSample],
    *,
    step: int,
    kept: Collection[int] | None = None,
) -> bytes:
    """The episodes of one step. kept: numbers of the samples whose tokens go in; None: all of them."""
    shown = [s for s in samples if kept is None or s.index in kept]
    columns, vocabulary = Columns(), Vocabulary(record)
    pieces = [vocabulary.numbers(sample.tokens) for sample in shown]
    if shown:
        _add_tokens(columns, shown, pieces, wide=len(vocabulary.known) > np.iinfo(np.uint16).max)
    names = {name for sample in shown for name in sample.images}
    for name, content in record.images(step).items() if names else ():
        if name in names:
            columns.add_file(f"image {name}", content)
    starts = np.cumsum([0, *(len(sample.tokens) for sample in shown)]).tolist()
    places = {sample.index: (starts[i], len(sample.tokens)) for i, sample in enumerate(shown)}
    header = {
        "ids": [token for token, _ in vocabulary.known],
        "pieces": [piece for _, piece in vocabulary.known],
        "columns": columns.places,
        "samples": [_scalars(s, places.get(s.index)) for s in samples]
        + [_other(g, p) for g in groups for p in g.others],
        "groups": {
            g.group_id: {
                "datasource": g.datasource,
                "environment": g.environment,
                "count": g.count,
                "columns": g.columns,
            }
            for g in groups
        },
    }
    return pack(header, columns.parts)


def pack(header: Mapping[str, Any], parts: Sequence[bytes] = ()) -> bytes:
    """A block of a header and columns."""
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 4) % PLACES)
    return gzip.compress(len(text).to_bytes(4, "little") + text + b"".join(parts), LEVEL, mtime=0)


class Vocabulary:
    """Tokens of a step with the texts that they stand for. The same token has several where it ends a character."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.known: dict[tuple[int, str], int] = {}

    def numbers(self, tokens: NDArray[np.int32]) -> list[int]:
        """The number of each token among `known`."""
        known = self.known
        pairs = zip(tokens.tolist(), self._record.pieces(tokens), strict=True)
        return [known.setdefault(pair, len(known)) for pair in pairs]


def _add_tokens(
    columns: Columns, samples: Sequence[RecordedSample], pieces: Sequence[Sequence[int]], *, wide: bool
) -> None:
    joined = np.fromiter((number for row in pieces for number in row), dtype="<u4" if wide else "<u2")
    columns.add("piece", joined)
    columns.add("trainable", _joined([s.trainable for s in samples]).astype("u1"))
    columns.add("version", _joined([s.versions for s in samples]).astype("<i4"))
    columns.add("logprob", short(_joined([s.engine_logprobs for s in samples])))
    columns.add("difference", short(_joined([difference(s) for s in samples])))
    columns.add("advantage", short(_joined([s.advantages for s in samples])))


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays)


def difference(sample: RecordedSample) -> NDArray[np.float32]:
    """Engine's minus trainer's log-probs; NaN where the trainer measured none."""
    if sample.trainer_logprobs is None:
        return np.full(len(sample.tokens), np.nan, dtype=np.float32)
    gap = sample.engine_logprobs.astype(np.float32) - sample.trainer_logprobs.astype(np.float32)
    return np.where(sample.trainable, gap, np.float32(np.nan)).astype(np.float32)


def short(values: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers with KEPT_BITS of their mantissa, which compress well."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    dropped = 23 - KEPT_BITS
    rounded = (bits + np.uint32(1 << (dropped - 1))) & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return np.where(np.isfinite(values), rounded, bits).astype("<u4").view("<f4")


def number(value: float | None) -> float | None:
    """A number as JSON can hold it, to six digits; None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _scalars(sample: RecordedSample, place: tuple[int, int] | None) -> dict[str, Any]:
    start, length = place or (-1, len(sample.tokens))
    return {
        "index": sample.index,
        "group": sample.group_id,
        "episode": sample.sample_index,
        "place": sample.place,
        "miniBatch": sample.mini_batch,
        "reward": number(sample.reward),
        "score": number(sample.score),
        "shaped": number(sample.shaped),
        "label": sample.label,
        "stop": sample.stop_reason.value,
        "promptLength": sample.prompt_length,
        "turns": [[t.start, t.end, t.finish_reason, number(t.reward)] for t in sample.turns],
        "logs": {name: number(value) for name, value in sample.extra_logs.items()},
        "images": list(sample.images),
        "start": start,
        "length": length,
    }


def _other(group: RecordedGroup, place: int) -> dict[str, Any]:
    """A sample that was not trained on."""
    info = group.others[place]
    return {
        "index": -1,
        "group": group.group_id,
        "place": place,
        "reward": number(info.get("reward")),
        "score": number(info.get("score")),
        "stop": info.get("stop_reason", ""),
        "failure": info.get("failure", ""),
        "failed": bool(info.get("failed")),
        "logs": {name: number(value) for name, value in (info.get("extra_logs") or {}).items()},
        "start": -1,
        "length": int(info.get("total_length") or 0),
    }


def interesting(samples: Sequence[RecordedSample], count: int) -> set[int]:
    """Numbers of the `count` samples that are worth a look: the worst, the best, the second worst and so on."""
    ranked = sorted(samples, key=lambda s: -math.inf if s.reward is None else s.reward)
    ends = zip(ranked, reversed(ranked), strict=True)
    return set(list(dict.fromkeys(s.index for pair in ends for s in pair))[:count])
