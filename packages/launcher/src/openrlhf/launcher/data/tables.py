"""Rows of tables: CSV files, which are read here, and whatever the `datasets` library opens."""

from __future__ import annotations

import csv
import hashlib
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from openrlhf.launcher.data.rows import Row, Rows
from openrlhf.launcher.data.text_files import not_utf8, open_utf8
from openrlhf.launcher.data.values import json_value

_SCAN_BATCH = 1000
_CSV_BATCH = 50_000
_UNNAMED = "Unnamed: {}"
"""Name of a column without one, by its number: data frames write their index so, and read it back under this name."""


class Table(Rows):
    """A view of a `datasets.Dataset`, with its values as JSON has them (see `values`).

    Arrow fills the fields that a nested object lacks with null: they are dropped. Images stay undecoded
    (`{"bytes", "path"}`). Numbers have no spelling in such files; they are written as JSON would.
    """

    def __init__(
        self,
        table: Any,
        name: str,
        *,
        empty_is_null: bool = False,
        lines: Sequence[int] | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        """files: where the rows are read from; else those that the library keeps them in."""
        self._table = table
        self.name = name
        self._empty_is_null = empty_is_null
        self._lines = lines
        self._files = files or [Path(file["filename"]) for file in table.cache_files]

    @cached_property
    def columns(self) -> Sequence[str]:
        return self._table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:
        return json_value(self._table[index])

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.iter(batch_size=_SCAN_BATCH):
            for values in zip(*batch.values(), strict=True):
                yield json_value(dict(zip(batch, values, strict=True)))

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}" if self._lines is None else f"{self.name}, line {self._lines[index]}"

    def digest(self) -> str:
        contents = hashlib.sha256(repr((len(self), self.columns, self._empty_is_null)).encode())
        for path in self._files:
            with path.open("rb") as file:
                contents.update(hashlib.file_digest(file, "sha256").digest())
        return contents.hexdigest()

    def spelled(self, index: int, key: str) -> Any:
        value = super().spelled(index, key)
        return None if self._empty_is_null and value == "" else value


def open_csv(path: Path, *, separator: str) -> Rows:
    """Every cell stays text, so that a label such as 007 keeps its spelling; an empty cell is null.

    Raises ValueError with file, line and reason: another encoding, a quote that is never closed, a row with more cells
    than there are columns, a column name that stands twice.
    """
    from datasets import Dataset, Features, Value, concatenate_datasets

    csv.field_size_limit(sys.maxsize)  # its 128 KiB are less than a long text
    with io.TextIOWrapper(open_utf8(path), encoding="utf-8-sig", newline="") as text:
        records = _records(text, path, separator)
        header = _header(next(records, (1, []))[1], path)
        features = Features({column: Value("string") for column in header})
        parts, lines, batch = [], [], []
        for line, cells in records:
            if len(cells) > len(header):
                raise ValueError(f"{path}, line {line}: {len(cells)} cells, but there are {len(header)} columns")
            lines.append(line)
            batch.append([*cells, *[""] * (len(header) - len(cells))])
            if len(batch) == _CSV_BATCH:
                parts.append(Dataset.from_dict(_columns(header, batch), features=features))
                batch = []
        parts.append(Dataset.from_dict(_columns(header, batch), features=features))
    return Table(concatenate_datasets(parts), str(path), empty_is_null=True, lines=lines, files=[path])


def open_table(path: Path, builder: str, pattern: str) -> Rows:
    """The rows of a file that the `datasets` library reads. ValueError with file and reason where it cannot."""
    from datasets import load_dataset

    try:
        table = load_dataset(builder, data_files=[pattern], split="train")
    except Exception as error:  # datasets wraps what Arrow raises, of whatever kind
        reason = error.__cause__ or error
        raise ValueError(f"{path}: cannot be read as {builder} ({type(reason).__name__}: {reason})") from error
    return Table(undecoded(table), str(path), files=[path])


def undecoded(table: Any) -> Any:
    """The table as plain values, its image columns as {"bytes", "path"}: decoding is the image reader's business."""
    from datasets import Image, List

    table = table.with_format(None)  # a saved data set keeps the format of who saved it, such as tensors
    for column, feature in table.features.items():
        if isinstance(feature, Image):
            table = table.cast_column(column, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            table = table.cast_column(column, List(Image(decode=False)))
    return table


def _records(text: TextIO, path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """(first line, cells) of every record that is not blank."""
    reader = csv.reader(text, delimiter=separator, strict=True)
    start = 1
    try:
        for cells in reader:
            if any(cells) or len(cells) > 1:
                yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        reason = "a quote is opened and never closed" if "unexpected end of data" in str(error) else str(error)
        raise ValueError(f"{path}, line {start}: {reason}") from None
    except UnicodeDecodeError:
        raise _wrong_byte(path) from None


def _wrong_byte(path: Path) -> ValueError:
    """The error for the first line that is no UTF-8."""
    with open_utf8(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return not_utf8(f"{path}, line {number}", error)
    raise AssertionError(f"{path} was no UTF-8 a moment ago")


def _header(cells: Sequence[str], path: Path) -> list[str]:
    names = [cell or _UNNAMED.format(i) for i, cell in enumerate(cells)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: column {twice[0]!r} stands twice in the first line; rename one of them")
    return names


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}
