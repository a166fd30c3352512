"""Supervised data: rows -> units of tokens, which one process of a machine makes and all map into their memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch

from openrlhf.agents.chat.template import PromptError
from openrlhf.core.batch import Batch, pad_rows
from openrlhf.launcher.data.blend import blend
from openrlhf.launcher.data.dropped import WARN, DroppedText
from openrlhf.launcher.data.locate import list_entries, mixing_probabilities, open_dataset
from openrlhf.launcher.data.readers import DroppedRow, Unit, UnitReader
from openrlhf.launcher.data.rows import Rows, require_fields
from openrlhf.launcher.data.token_cache import About, TokenCache, TokenTable, key_of

log = logging.getLogger(__name__)

REMEDY = "give one that writes it with --data.tokenizer_chat_template"


class SupervisedDataset:
    """Units by number, in file order, mapped from the cache. Of its own a process holds 16 bytes per unit where several
    sources are mixed or one is cut, else nothing.

    lengths [N] int32: tokens of each unit. dropped: reason -> rows that were left out. rows_per_unit: sequences of a
    unit: 1, or 2 for pairs.
    """

    def __init__(
        self,
        tables: Sequence[TokenTable],
        *,
        places: tuple[np.ndarray, np.ndarray] | None,
        dropped: Counter[str],
        rows_per_unit: int,
    ) -> None:
        """places: (table, unit) of each number; None: those of the only table as they stand."""
        self._tables = tables
        self._places = places
        self.lengths = tables[0].lengths if places is None else _lengths(tables, *places)
        self.dropped = dropped
        self.rows_per_unit = rows_per_unit

    def __len__(self) -> int:
        return len(self.lengths)

    def unit(self, index: int) -> Unit:
        """Unit number `index`."""
        if self._places is None:
            return self._tables[0].unit(index)
        table, unit = (int(place[index]) for place in self._places)
        return self._tables[table].unit(unit)

    def first(self, count: int) -> SupervisedDataset:
        """The first `count` units as a dataset of their own."""
        numbers = np.arange(min(count, len(self)))
        places = (np.zeros_like(numbers), numbers) if self._places is None else self._places
        cut = (places[0][:count], places[1][:count])
        return SupervisedDataset(self._tables, places=cut, dropped=self.dropped, rows_per_unit=self.rows_per_unit)


def _lengths(tables: Sequence[TokenTable], source: np.ndarray, unit: np.ndarray) -> np.ndarray:
    lengths = np.empty(len(unit), dtype=np.int32)
    for number, table in enumerate(tables):
        at = source == number
        lengths[at] = table.lengths[unit[at]]
    return lengths


def load_supervised(
    text: str | None,
    reader: UnitReader,
    cache: TokenCache,
    *,
    flag: str = "--data.dataset",
    split: str = "train",
    probs: str | None = None,
    max_samples: int,
    seed: int,
    dropped_text: str = WARN,
) -> SupervisedDataset:
    """Find, check and tokenise the rows of the datasets in `text`, or find that done. Needs a tokenizer, no model.

    Raises ValueError: nothing found at a path, a key that no row has (with the fields there are), a bad row (with its
    place and what was expected), nothing left to train on, a text that the chat template drops under
    `--data.dropped_text error`. Rows that train nothing are dropped and counted.
    """
    entries = list_entries(text, flag=flag)
    weights = None if probs is None else mixing_probabilities(probs, len(entries))
    lossy = DroppedText(flag, dropped_text, remedy=REMEDY)
    tables, seen = [], 0
    for entry in entries:
        rows = open_dataset(entry, split=split, flag=flag)
        key, seen = key_of(rows.digest(), reader, limit=max_samples), seen + min(len(rows), max_samples)
        tables.append(_table(rows, reader, cache, key, max_samples, lossy))
    lossy.report(of=seen)
    dropped = Counter[str]()
    for table in tables:
        dropped.update(table.about.dropped)
    places = None
    if len(tables) > 1 or len(tables[0]) > max_samples:
        plan = blend([len(table) for table in tables], probs=weights, max_samples=max_samples, seed=seed)
        places = (plan.source, plan.row)
    dataset = SupervisedDataset(tables, places=places, dropped=dropped, rows_per_unit=reader.rows_per_unit)
    for reason, count in dropped.items():
        log.warning("%s: %d rows dropped: %s", flag, count, reason)
    if injected := sum(table.about.injected for table in tables):
        log.warning("%s: %d messages spell out special tokens; these are read as such", flag, injected)
    if not len(dataset):
        raise ValueError(f"{flag}: no row is left to train on ({'; '.join(dropped)}); raise --data.max_len")
    return dataset


def _table(rows: Rows, reader: UnitReader, cache: TokenCache, key: str, limit: int, lossy: DroppedText) -> TokenTable:
    """The units of the first `limit` rows."""
    table = cache.table(key, lambda add: _tokenise(rows, reader, limit, lossy, add))
    about = table.about
    if about.lost:
        number, text = about.first_lost
        try:
            lossy.count(about.lost, rows.where(number), text)
        except PromptError as error:
            raise ValueError(f"{rows.where(number)}: {error}") from error
    return table


def _tokenise(rows: Rows, reader: UnitReader, limit: int, lossy: DroppedText, add: Callable[[Unit], None]) -> About:
    """Hand every unit of the first `limit` rows to `add`."""
    size = min(len(rows), limit)
    if size == 0:
        raise ValueError(f"{lossy.flag}: {rows.name} has no rows")
    require_fields(rows, reader.fields)
    about, before, dropped = About({}), reader.renderer.injected, Counter[str]()
    for index, row in enumerate(islice(rows, size)):
        try:
            units = reader.read(row)
            if lost := reader.renderer.lost:
                lossy.refuse(lost[0])
        except DroppedRow as reason:
            dropped[str(reason)] += 1
            continue
        except PromptError as error:
            raise ValueError(f"{rows.where(index)}: {error}") from error
        if lost:
            about.first_lost = about.first_lost if about.lost else (index, str(lost[0]))
            about.lost += 1
        for unit in units:
            add(unit)
    about.dropped, about.injected = dict(dropped), reader.renderer.injected - before
    return about


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
