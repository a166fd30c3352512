"""What can be wrong with data at first sight: paths and field names. Needs no torch, which takes seconds to load.

Only what is cheap to look at is looked at; the readers check everything once more, row by row.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from openrlhf.launcher.data.locate import list_entries, open_dataset
from openrlhf.launcher.data.rows import require_fields

JSON = (".jsonl", ".ndjson", ".json")
CSV = {".csv": ",", ".tsv": "\t"}
LARGEST = 64 * 2**20
"""Bytes of a file that is looked into here: finding its lines takes a fraction of a second."""
EXTRA = "--data.extra_keys"
Fields = Sequence[tuple[str, str]]
"""(flag, key) of the fields that some row must have."""


def check_at_sight(text: str | None, fields: Fields, *, split: str, flag: str) -> None:
    """ValueError for a local path where nothing is, and for a key that no row of a local JSON or CSV file has."""
    entries = list_entries(text, flag=flag)
    if len(entries) > 1:  # one of them has to have such a field
        fields = [(name, key) for name, key in fields if name != EXTRA]
    for entry in entries:
        path = Path(entry).expanduser()
        suffix = path.suffix.lower()
        if path.is_file() and path.stat().st_size > LARGEST:
            continue
        if path.is_file() and suffix in JSON:
            rows = open_dataset(entry, split=split, flag=flag)
            if len(rows):
                require_fields(rows, fields)
        elif path.is_file() and suffix in CSV:
            _check_header(path, CSV[suffix], fields)
        elif not path.exists() and "@" not in entry and _is_path(entry):
            open_dataset(entry, split=split, flag=flag)  # says what is missing


def _is_path(entry: str) -> bool:
    return entry.startswith(("/", ".", "~")) or Path(entry).suffix.lower() in (*JSON, *CSV, ".parquet", ".arrow")


def _check_header(path: Path, separator: str, fields: Fields) -> None:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader(file, delimiter=separator), [])
    for flag, key in fields:
        if header and key not in header and key.split(".")[0] not in header:
            raise ValueError(f"{flag} {key!r}: {path} has no such field; it has {', '.join(header)}")
