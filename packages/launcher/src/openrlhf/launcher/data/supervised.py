"""Supervised data: rows -> units of tokens, measured in one pass, read again when they are drawn."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from openrlhf.agents.chat.template import PromptError
from openrlhf.core.batch import Batch, pad_rows
from openrlhf.launcher.data.blend import Blend, blend
from openrlhf.launcher.data.dropped import WARN, DroppedText
from openrlhf.launcher.data.locate import list_entries, mixing_probabilities, open_dataset
from openrlhf.launcher.data.readers import DroppedRow, PairReader, SftReader, Unit
from openrlhf.launcher.data.rows import Rows, require_fields

log = logging.getLogger(__name__)

REMEDY = "give one that writes it with --data.tokenizer_chat_template"


UnitReader = SftReader | PairReader


class SupervisedDataset:
    """Units by number, in file order. Memory: 24 bytes per unit, whatever the texts.

    lengths [N] int64: tokens of each unit. dropped: reason -> rows that were left out.
    """

    def __init__(self, sources: Sequence[Rows], reader: UnitReader, places: np.ndarray, dropped: Counter[str]) -> None:
        self._sources = sources
        self._reader = reader
        self._source, self._row, self._part = places[:, 0], places[:, 1], places[:, 2]
        self.lengths: np.ndarray = places[:, 3]
        self.dropped = dropped

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def rows_per_unit(self) -> int:
        """Sequences of a unit: 1, or 2 for pairs."""
        return self._reader.rows_per_unit

    def unit(self, index: int) -> Unit:
        """Unit number `index`."""
        row = self._sources[int(self._source[index])][int(self._row[index])]
        return self._reader.read(row)[int(self._part[index])]

    def first(self, count: int) -> SupervisedDataset:
        """The first `count` units as a dataset of their own."""
        places = np.stack([self._source, self._row, self._part, self.lengths], 1)[:count]
        return SupervisedDataset(self._sources, self._reader, places, self.dropped)


def load_supervised(
    text: str | None,
    reader: UnitReader,
    *,
    flag: str = "--data.dataset",
    split: str = "train",
    probs: str | None = None,
    max_samples: int,
    seed: int,
    dropped_text: str = WARN,
) -> SupervisedDataset:
    """Find, check and measure the rows of the datasets in `text`. Needs a tokenizer, no model.

    Raises ValueError: nothing found at a path, a key that no row has (with the fields there are), a bad row (with its
    place and what was expected), nothing left to train on, a text that the chat template drops under
    `--data.dropped_text error`. Rows that train nothing are dropped and counted.
    """
    entries = list_entries(text, flag=flag)
    weights = None if probs is None else mixing_probabilities(probs, len(entries))
    sources = [open_dataset(entry, split=split, flag=flag) for entry in entries]
    dropped: Counter[str] = Counter()
    lossy = DroppedText(flag, dropped_text, remedy=REMEDY)
    measured = [_measure(rows, reader, max_samples, dropped, lossy) for rows in sources]
    lossy.report(of=sum(min(len(rows), max_samples) for rows in sources))
    plan = blend([len(m) for m in measured], probs=weights, max_samples=max_samples, seed=seed)
    dataset = SupervisedDataset(sources, reader, _places(plan, measured), dropped)
    for reason, count in dropped.items():
        log.warning("%s: %d rows dropped: %s", flag, count, reason)
    if reader.renderer.injected:
        log.warning("%s: %d messages spell out special tokens; these are read as such", flag, reader.renderer.injected)
    if not len(dataset):
        raise ValueError(f"{flag}: no row is left to train on ({'; '.join(dropped)}); raise --data.max_len")
    return dataset


def _measure(rows: Rows, reader: UnitReader, limit: int, dropped: Counter[str], lossy: DroppedText) -> np.ndarray:
    """(row, part, length) of every unit of the first `limit` rows, [units, 3] int64."""
    size = min(len(rows), limit)
    if size == 0:
        raise ValueError(f"{lossy.flag}: {rows.name} has no rows")
    require_fields(rows, reader.fields)
    found: list[np.ndarray] = []
    chunk: list[tuple[int, int, int]] = []
    for index, row in enumerate(islice(rows, size)):
        try:
            units = reader.read(row)
            lossy.add(rows.where(index), reader.renderer.lost)
        except DroppedRow as reason:
            dropped[str(reason)] += 1
            continue
        except PromptError as error:
            raise ValueError(f"{rows.where(index)}: {error}") from error
        chunk += [(index, part, unit.length) for part, unit in enumerate(units)]
        if len(chunk) >= _CHUNK:
            found.append(np.array(chunk, dtype=np.int64))
            chunk = []
    return np.concatenate([*found, np.array(chunk, dtype=np.int64).reshape(-1, 3)])


_CHUNK = 10_000  # measured units that are kept as Python objects


def _places(plan: Blend, measured: Sequence[np.ndarray]) -> np.ndarray:
    """(source, row, part, length) of every unit, [N, 4] int64."""
    places = np.empty((len(plan), 4), dtype=np.int64)
    places[:, 0] = plan.source
    for number, units in enumerate(measured):
        at = plan.source == number
        places[at, 1:] = units[plan.row[at]]
    return places


def collate(units: Sequence[tuple[int, Unit]], *, margins: bool) -> Batch:
    """(number, unit) -> tensors; the rows of a unit are neighbours and share its number. No units: size 0."""
    rows = [row for _, unit in units for row in unit.rows]
    width = max((len(row.tokens) for row in rows), default=0)
    mask = pad_rows([[1] * len(row.tokens) for row in rows], width=width, value=0, dtype=torch.bool)
    index = [number for number, unit in units for _ in unit.rows]
    margin = [unit.margin for _, unit in units for _ in unit.rows]
    return Batch(
        tokens=pad_rows([row.tokens for row in rows], width=width, value=0, dtype=torch.long),
        attention_mask=mask,
        action_mask=pad_rows([row.mask for row in rows], width=width, value=0, dtype=torch.bool),
        index=torch.tensor(index, dtype=torch.long),
        margins=torch.tensor(margin, dtype=torch.float32) if margins else None,
    )
