"""From what the user wrote (`a.jsonl,org/name@folder`) to rows: local files, folders, saved datasets, hub names.

A local path always wins over a hub name, also one that holds a comma or an `@`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from openrlhf.launcher.data.rows import Joined, JsonRows, Rows
from openrlhf.launcher.data.tables import Table, open_csv, open_table, undecoded
from openrlhf.launcher.data.text_files import COMPRESSED, open_utf8

_SPLIT = re.compile(r"^(?P<name>[\w.-]+?)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?$")
_BUILDERS = {
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"},
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
}
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}


ROUNDING = 1e-6


def split_entries(text: str) -> list[str]:
    """The entries of a comma list; pieces that only together name an existing path are one entry."""
    pieces = text.split(",")
    entries: list[str] = []
    start = 0
    while start < len(pieces):
        ends = range(len(pieces), start + 1, -1)
        end = next((e for e in ends if _exists(",".join(pieces[start:e]).strip())), start + 1)
        entries.append(",".join(pieces[start:end]).strip())
        start = end
    if not all(entries):
        raise ValueError(f"{text!r}: an empty name between commas")
    return entries


def open_dataset(entry: str, *, split: str, flag: str) -> Rows:
    """The rows of one entry.

    entry: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a folder with such files or written by
    `save_to_disk`, or a hub name; `name@folder` reads one folder of it.
    split: `train`, `test`, ..., also with a slice (`train[:100]`, `train[10%:]`). A single file is its own split.
    Raises ValueError, which names `flag`, when there is no such dataset, split or file.
    """
    match = _SPLIT.match(split)
    if match is None:
        raise ValueError(f"split {split!r} is not understood; expected a name such as 'train' or 'train[:100]'")
    rows = _open(entry, split=match["name"], flag=flag)
    start, stop = (_bound(match[k], len(rows), default) for k, default in (("start", 0), ("stop", len(rows))))
    return rows if (start, stop) == (0, len(rows)) else Joined(rows.name, [(rows, range(start, stop))])


def _open(entry: str, *, split: str, flag: str) -> Rows:
    path, data_dir = Path(entry).expanduser(), None
    if not path.exists() and "@" in entry:
        name, _, data_dir = entry.rpartition("@")
        path = Path(name).expanduser()
        if path.is_dir():
            path, data_dir = path / data_dir, None
        entry = name if data_dir else entry
    if path.is_file():
        return open_file(path)
    if path.is_dir():
        return _open_folder(path, split, flag)
    if _looks_local(entry):
        raise ValueError(f"{flag}: not found: {path}")
    return _open_hub(entry, data_dir, split, flag)


def open_file(path: Path) -> Rows:
    """The rows of one file, by its (case-insensitive) extension."""
    suffix = _extension(path)
    if suffix in (".jsonl", ".json", ".ndjson"):
        return JsonRows(path, open_utf8(path))
    if suffix not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        raise ValueError(f"{path}: unknown extension {path.suffix!r}; datasets are read from {known}")
    if suffix in (".csv", ".tsv"):
        return open_csv(path, separator="\t" if suffix == ".tsv" else ",")
    return open_table(path, _BUILDERS[suffix], _glob_safe(path))


def _open_folder(folder: Path, split: str, flag: str) -> Rows:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _open_saved(folder, split, flag)
    files = sorted(
        p for p in folder.rglob("*") if p.is_file() and _extension(p) in _BUILDERS and not _hidden(p, folder)
    )
    files = [p for p in files if p.name not in ("dataset_infos.json", "dataset_info.json", "state.json")]
    if not files:
        raise ValueError(f"{flag}: folder {folder} holds no {', '.join(sorted(_BUILDERS))} file")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file, folder), []).append(file)
    chosen = by_split.get(_canonical(split))
    if chosen is None:
        raise ValueError(f"{flag}: folder {folder} has no split {split!r}; it has {', '.join(sorted(by_split))}")
    parts = [open_file(p) for p in chosen]
    return parts[0] if len(parts) == 1 else Joined(str(folder), [(rows, range(len(rows))) for rows in parts])


def _open_saved(folder: Path, split: str, flag: str) -> Rows:
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(folder))
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise ValueError(f"{flag}: {folder} has no split {split!r}; it has {', '.join(map(str, loaded))}")
        loaded = loaded[split]
    return Table(undecoded(loaded), str(folder))


def _open_hub(name: str, data_dir: str | None, split: str, flag: str) -> Rows:
    from datasets import load_dataset

    try:
        table = load_dataset(name, data_dir=data_dir, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{flag}: not found: {name!r} (there is no such local path; as a hub name with split {split!r}: {error})"
        ) from error
    return Table(undecoded(table), name)


def _split_of(file: Path, folder: Path) -> str:
    """The split that a file's name or one of its folders says; `train` when nothing does."""
    for part in reversed(file.relative_to(folder).parts):
        words = re.split(r"[-_.\s]", part.lower())
        for split, names in _SPLIT_WORDS.items():
            if any(w in names for w in words):
                return split
    return "train"


def _canonical(split: str) -> str:
    return next((k for k, names in _SPLIT_WORDS.items() if split.lower() in names), split)


def _bound(text: str | None, size: int, default: int) -> int:
    if text is None:
        return default
    value = round(int(text[:-1]) * size / 100) if text.endswith("%") else int(text)
    return min(max(value + size if value < 0 else value, 0), size)


def _extension(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in COMPRESSED:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def _looks_local(entry: str) -> bool:
    path = Path(entry)
    return entry.startswith(("/", ".", "~")) or _extension(path) in _BUILDERS or len(path.parts) > 2


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)


def _exists(text: str) -> bool:
    return bool(text) and Path(text).expanduser().exists()


def _glob_safe(path: Path) -> str:
    """The path as a pattern that matches only itself."""
    return re.sub(r"([\[\]*?])", r"[\1]", str(path.resolve()))


def mixing_probabilities(text: str, sources: int) -> list[float]:
    """`0.7,0.3` as numbers. ValueError when they are not one positive number per source with the sum 1."""
    words = text.split(",")
    if len(words) != sources:
        raise ValueError(f"{sources} datasets and {len(words)} probabilities")
    try:
        probs = [float(word) for word in words]
    except ValueError:
        probs = []
    if not probs or any(not p > 0 for p in probs) or abs(sum(probs) - 1) > ROUNDING:
        raise ValueError("probabilities are numbers above 0 that add up to 1")
    return probs


def list_entries(text: str | None, *, flag: str) -> Sequence[str]:
    """`split_entries` of a required option."""
    if not text:
        raise ValueError(f"{flag} is missing: give a file, a folder or a hub name")
    return split_entries(text)
