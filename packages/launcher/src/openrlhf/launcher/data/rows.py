"""Rows of one data file, read on demand: objects in JSON lines or in an array, and rows put together.

Not here: tables (`tables`), which files belong to a dataset (`locate`), mixing several (`blend`), what a row means
(`prompts`).
JSON is read without Arrow and the `datasets` library: so numbers keep their spelling, objects of different rows are
never merged into one set of fields, an error names its line, and a run on JSON need not load that library for seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any

from openrlhf.launcher.data.text_files import not_utf8

Row = Mapping[str, Any]
Span = tuple[int, int, int]
_MISSING = object()
_DECODER = json.JSONDecoder()
_READ_BYTES = 1 << 20
USUAL_NAMES = {
    "--data.input_key": ("prompt", "problem", "question", "query", "messages", "conversations", "instruction", "input"),
    "--data.label_key": ("label", "answer", "solution", "ground_truth", "target", "output"),
    "--data.image_key": ("images", "image"),
}
"""Field names that data sets use for what a flag names, most usual first."""


class Rows(ABC):
    """A sequence of rows that can say where each of them came from. name: file, folder or hub name, for messages."""

    name: str

    @cached_property
    def columns(self) -> Sequence[str]:
        """All field names: of every row, not only of the first."""
        return list(dict.fromkeys(key for row in self for key in row))

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    @abstractmethod
    def where(self, index: int) -> str:
        """The place of a row in the user's words, such as `data.jsonl, line 7`."""

    @abstractmethod
    def digest(self) -> str:
        """What stands for the contents of all rows, whatever their place and names."""

    def spelled(self, index: int, key: str) -> Any:
        """The value of a (dotted) key, numbers and booleans as `str`, spelled as in the file."""
        return spell(lookup(self[index], key))


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


class JsonRows(Rows):
    """The objects of a JSON file: one per line, or the members of one array. Reads them from the file when asked.

    Holds 24 bytes per row in memory: where each begins and ends in the file, and its number. Of lines, blank ones are
    skipped; a byte order mark is allowed. Raises ValueError with file and place for a row that is no JSON object.
    file: the opened contents, which are closed here.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.name = str(path)
        # A bare descriptor: a file object that the garbage collector meets in a cycle warns before `__del__` runs.
        self._descriptor = -1
        self._spans = array("q")  # begin, end and number of one row after the other
        with file:
            self._descriptor = os.dup(file.fileno())
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
            file.seek(0)
            self._unit = "row" if start == b"[" else "line"
            for span in self._members(file) if self._unit == "row" else _lines(file):
                self._spans.extend(span)

    def __len__(self) -> int:
        return len(self._spans) // 3

    def __getitem__(self, index: int) -> Row:
        return self._parse(index, self._text(index))

    def where(self, index: int) -> str:
        return f"{self.name}, {self._unit} {self._spans[3 * index + 2]}"

    def spelled(self, index: int, key: str) -> Any:
        text = self._text(index)
        value = lookup(self._parse(index, text), key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = lookup(json.loads(text, parse_float=str, parse_int=str, parse_constant=str), key)
        return spell(value)

    def digest(self) -> str:
        contents, at = hashlib.sha256(), 0
        while part := os.pread(self._descriptor, _READ_BYTES, at):
            contents.update(part)
            at += len(part)
        return contents.hexdigest()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _members(self, file: IO[bytes]) -> Iterator[Span]:
        """The members of the array that the file holds, found with the parser itself."""
        content = file.read()
        try:
            text = content.decode("utf-8-sig")
            members = json.loads(text)
        except UnicodeDecodeError as error:
            raise not_utf8(self.name, error) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.name}: not valid JSON ({error})") from None
        at, seen = text.index("["), 0
        place = len(content) - len(text.encode())  # bytes, behind the mark
        for number, member in enumerate(members):
            if not isinstance(member, dict):
                raise ValueError(f"{self.name}, row {number}: {_no_object(member)}")
            begin = text.index("{", at)
            at = _DECODER.raw_decode(text, begin)[1]
            place += len(text[seen:begin].encode())
            seen = at
            size = len(text[begin:at].encode())
            yield place, place + size, number
            place += size

    def _text(self, index: int) -> str:
        begin, end = self._spans[3 * index : 3 * index + 2]
        # Positional: processes that were forked to read the data share the file's own position.
        content = os.pread(self._descriptor, end - begin, begin)
        try:
            return content.decode("utf-8-sig")  # files that were put together have their marks inside
        except UnicodeDecodeError as error:
            raise not_utf8(self.where(index), error) from None

    def _parse(self, index: int, text: str) -> Row:
        try:
            row = json.loads(text, parse_constant=str)  # NaN and Infinity are text, as in every container
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.where(index)}: not valid JSON ({error}); expected one object per line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(index)}: {_no_object(row)}")
        return row


def _lines(file: IO[bytes]) -> Iterator[Span]:
    end = 0
    for number, line in enumerate(file, start=1):
        begin, end = end, end + len(line)
        if line.strip(b"\xef\xbb\xbf \t\r\n"):
            yield begin, end, number


class Joined(Rows):
    """Ranges of other rows one after the other: the files of one split, a slice of a split."""

    def __init__(self, name: str, parts: Sequence[tuple[Rows, range]]) -> None:
        self.name = name
        self._parts = parts
        self._ends = list(accumulate(len(span) for _, span in parts))

    @cached_property
    def columns(self) -> Sequence[str]:
        return list(dict.fromkeys(c for rows, _ in self._parts for c in rows.columns))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        rows, place = self._find(index)
        return rows[place]

    def digest(self) -> str:
        return " ".join(f"{rows.digest()}[{span.start}:{span.stop}]" for rows, span in self._parts)

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(islice(iter(rows), span.start, span.stop) for rows, span in self._parts)

    def where(self, index: int) -> str:
        rows, place = self._find(index)
        return rows.where(place)

    def spelled(self, index: int, key: str) -> Any:
        rows, place = self._find(index)
        return rows.spelled(place, key)

    def _find(self, index: int) -> tuple[Rows, int]:
        k = bisect_right(self._ends, index)
        if k == len(self._parts):
            raise IndexError(f"row {index} of {len(self)}")
        rows, span = self._parts[k]
        return rows, span[index - (self._ends[k - 1] if k else 0)]


def require_fields(rows: Rows, wanted: Sequence[tuple[str, str]]) -> None:
    """ValueError when a (flag, key) that was asked for is in no row: with the fields that are there."""
    missing = [(flag, key) for flag, key in wanted if not has_field(rows, key)]
    for flag, key in missing:
        raise ValueError(no_field(flag, key, rows) + _suggestion([flag for flag, _ in missing], rows))


def has_field(rows: Rows, key: str) -> bool:
    """Whether some row may have the (dotted) key."""
    return has_key(rows[0], key) or key in rows.columns or key.split(".")[0] in rows.columns


def _suggestion(flags: Sequence[str], rows: Rows) -> str:
    """The flags to paste, where the usual names tell which fields are meant."""
    found = [(flag, next((n for n in USUAL_NAMES.get(flag, ()) if n in rows.columns), None)) for flag in flags]
    line = " ".join(f"{flag} {name}" for flag, name in found if name is not None)
    return f"; try {line}" if line else ""


def no_field(flag: str, key: str, rows: Rows) -> str:
    """What to say when no row has the field that a flag names."""
    nested = [f"{k}.{inner}" for k, v in rows[0].items() if isinstance(v, Mapping) for inner in v]
    return f"{flag} {key!r}: {rows.name} has no such field; it has {', '.join([*rows.columns, *nested])}"


def _no_object(value: Any) -> str:
    return f"expected an object, got {type(value).__name__}: {_short(value)}"


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
