"""Rows of one data file, read on demand: JSON lines and JSON arrays, and rows put together.

Not here: tables (`tables`), which files belong to a dataset (`locate`), mixing several (`blend`), what a row means
(`prompts`).
JSON is read without Arrow, so numbers keep their spelling and objects of different rows are never merged.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, Protocol

from openrlhf.launcher.data.text_files import not_utf8

Row = Mapping[str, Any]
_MISSING = object()
USUAL_NAMES = {
    "--data.input_key": ("prompt", "problem", "question", "query", "messages", "conversations", "instruction", "input"),
    "--data.label_key": ("label", "answer", "solution", "ground_truth", "target", "output"),
    "--data.image_key": ("images", "image"),
}
"""Field names that data sets use for what a flag names, most usual first."""


class Rows(Protocol):
    """A sequence of rows that can say where each of them came from."""

    @property
    def name(self) -> str:
        """The file, folder or hub name, for messages."""
        ...

    @property
    def columns(self) -> Sequence[str]:
        """All field names: of every row, not only of the first."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]: ...

    def where(self, index: int) -> str:
        """The place of a row in the user's words, such as `data.jsonl, line 7`."""
        ...

    def spelled(self, index: int, key: str) -> Any:
        """The value of a (dotted) key, numbers and booleans as `str`, spelled as in the file."""
        ...


def lookup(row: Row, key: str, default: Any = None) -> Any:
    """The value of `key`, which is a field name or a dotted path into nested objects (`reward_model.ground_truth`)."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
        if value is _MISSING:
            return default
    return value


def has_key(row: Row, key: str) -> bool:
    """True where the (dotted) key is there, even with the value null."""
    return lookup(row, key, _MISSING) is not _MISSING


def spell(value: Any) -> Any:
    """Numbers and booleans as text in JSON spelling; anything else unchanged."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


class JsonLines:
    """A JSON-lines file. Holds 8 bytes per row in memory and reads rows from the file when asked.

    Blank lines are skipped; a byte order mark is allowed. Raises ValueError with file and line for a line that is
    not a JSON object. file: the opened contents, where they are not those of the path.
    """

    def __init__(self, path: Path, file: IO[bytes] | None = None) -> None:
        self._path = path
        self._descriptor = -1
        self._offsets = array("q")
        self._lines = array("q")
        self._columns: Sequence[str] | None = None
        offset = 0
        with path.open("rb") if file is None else file as opened:
            # A bare descriptor: a file object that the garbage collector meets in a cycle warns before `__del__` runs.
            self._descriptor = os.dup(opened.fileno())
            for number, line in enumerate(opened, start=1):
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        self._size = offset

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def columns(self) -> Sequence[str]:
        if self._columns is None:
            self._columns = _union(self)
        return self._columns

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        return self._parse(index, self._line(index))

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index]}"

    def spelled(self, index: int, key: str) -> Any:
        line = self._line(index)
        value = lookup(self._parse(index, line), key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return lookup(json.loads(line, parse_float=str, parse_int=str, parse_constant=str), key)
        return spell(value)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _line(self, index: int) -> str:
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._size
        # Positional: processes that were forked to read the data share the file's own position.
        line = os.pread(self._descriptor, end - self._offsets[index], self._offsets[index])
        try:
            return line.decode("utf-8-sig")  # files that were put together have their marks inside
        except UnicodeDecodeError as error:
            raise not_utf8(self.where(index), error) from None

    def _parse(self, index: int, line: str) -> Row:
        try:
            row = json.loads(line, parse_constant=str)  # NaN and Infinity are text, as in every container
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.where(index)}: not valid JSON ({error}); expected one object per line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(index)}: expected an object, got {type(row).__name__}: {_short(row)}")
        return row


class JsonArray:
    """A .json file that holds one array of objects; read into memory."""

    def __init__(self, path: Path, file: IO[bytes] | None = None) -> None:
        self._path = path
        self._columns: Sequence[str] | None = None
        try:
            text = (path.read_bytes() if file is None else file.read()).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise not_utf8(str(path), error) from None
        self._rows = self._load(text, parse_constant=str)
        self._spelled = self._load(text, parse_float=str, parse_int=str, parse_constant=str)

    def _load(self, text: str, **options: Any) -> list[dict[str, Any]]:
        try:
            rows = json.loads(text, **options)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._path}: not valid JSON ({error})") from None
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"{self.where(i)}: expected an object, got {type(row).__name__}: {_short(row)}")
        return rows

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def columns(self) -> Sequence[str]:
        if self._columns is None:
            self._columns = _union(self)
        return self._columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def where(self, index: int) -> str:
        return f"{self._path}, row {index}"

    def spelled(self, index: int, key: str) -> Any:
        value = lookup(self._rows[index], key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return lookup(self._spelled[index], key)
        return spell(value)


class Part:
    """The rows start..stop-1 of other rows."""

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        self._rows, self._start, self._stop = rows, start, stop

    @property
    def name(self) -> str:
        return self._rows.name

    @property
    def columns(self) -> Sequence[str]:
        return self._rows.columns

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: int) -> Row:
        return self._rows[self._start + index]

    def __iter__(self) -> Iterator[Row]:
        return islice(iter(self._rows), self._start, self._stop)

    def where(self, index: int) -> str:
        return self._rows.where(self._start + index)

    def spelled(self, index: int, key: str) -> Any:
        return self._rows.spelled(self._start + index, key)


class Chain:
    """Several rows one after the other: the files of one split."""

    def __init__(self, parts: Sequence[Rows], name: str) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(p) for p in parts))
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def columns(self) -> Sequence[str]:
        return list(dict.fromkeys(c for p in self._parts for c in p.columns))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, local = self._find(index)
        return part[local]

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part

    def where(self, index: int) -> str:
        part, local = self._find(index)
        return part.where(local)

    def spelled(self, index: int, key: str) -> Any:
        part, local = self._find(index)
        return part.spelled(local, key)

    def _find(self, index: int) -> tuple[Rows, int]:
        k = bisect_right(self._ends, index)
        if k == len(self._parts):
            raise IndexError(f"row {index} of {len(self)}")
        return self._parts[k], index - (self._ends[k - 1] if k else 0)


def chain(parts: Sequence[Rows], name: str) -> Rows:
    """The parts as one; a single part is itself."""
    return parts[0] if len(parts) == 1 else Chain(parts, name)


def require_fields(rows: Rows, wanted: Sequence[tuple[str, str]]) -> None:
    """ValueError when a (flag, key) that was asked for is in no row: with the fields that are there."""
    first = rows[0]
    missing = [
        (flag, key)
        for flag, key in wanted
        if not has_key(first, key) and key not in rows.columns and key.split(".")[0] not in rows.columns
    ]
    for flag, key in missing:
        raise ValueError(no_field(flag, key, rows) + _suggestion([flag for flag, _ in missing], rows))


def _suggestion(flags: Sequence[str], rows: Rows) -> str:
    """The flags to paste, where the usual names tell which fields are meant."""
    found = [(flag, next((n for n in USUAL_NAMES.get(flag, ()) if n in rows.columns), None)) for flag in flags]
    line = " ".join(f"{flag} {name}" for flag, name in found if name is not None)
    return f"; try {line}" if line else ""


def no_field(flag: str, key: str, rows: Rows) -> str:
    """What to say when no row has the field that a flag names."""
    nested = [f"{k}.{inner}" for k, v in rows[0].items() if isinstance(v, Mapping) for inner in v]
    return f"{flag} {key!r}: {rows.name} has no such field; it has {', '.join([*rows.columns, *nested])}"


def _union(rows: Rows) -> Sequence[str]:
    seen: dict[str, None] = {}
    for row in rows:
        seen.update(dict.fromkeys(row))
    return list(seen)


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
