"""Tokenised training data on disk: written by one process of a node, mapped into the memory of all.

An entry is known by its contents: the rows of a data set, the tokenizer with its chat template, what the reader does
with a row, and this code. It is a folder that is complete or absent:

    <key>/tokens.arrow   a row per unit: tokens and mask of each of its sequences, margin (Arrow IPC, `BATCH` a batch)
          lengths.npy    [units] int32, the tokens of each
          about.json     what was dropped and warned of
    <key>.lock           held shared by who reads, alone by who writes or removes
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from openrlhf.agents.chat import template
from openrlhf.launcher.data.examples import TokenRow
from openrlhf.launcher.data.readers import Unit, UnitReader

log = logging.getLogger(__name__)

TOKENS, LENGTHS, ABOUT = "tokens.arrow", "lengths.npy", "about.json"
BATCH = 1024
WAIT_S = 24 * 3600.0
"""Longest wait for the process that tokenises; one that ends without an entry is replaced at once."""
POLL_S = 0.2
SCHEMA = pa.schema(
    {"tokens": pa.list_(pa.list_(pa.int32())), "mask": pa.list_(pa.list_(pa.bool_())), "margin": pa.float64()}
)


@dataclass
class About:
    """What was seen when the rows were read. dropped: reason -> rows. lost: rows of which the chat template drops a
    text; first_lost: the number of the first of them, and the text. injected: messages with special tokens."""

    dropped: dict[str, int]
    lost: int = 0
    first_lost: tuple[int, str] = (0, "")
    injected: int = 0


class TokenTable:
    """The units of an entry by number, mapped. lengths [units] int32: tokens of each."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._lock = lock
        self.about = About(**json.loads((folder / ABOUT).read_text()))
        self._file = pa.ipc.open_file(pa.memory_map(str(folder / TOKENS)))
        self.lengths: np.ndarray = np.load(folder / LENGTHS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __del__(self) -> None:
        os.close(self._lock)

    def unit(self, number: int) -> Unit:
        """Unit number `number`."""
        batch, place = self._file.get_batch(number // BATCH), number % BATCH
        rows = zip(_lists(batch.column("tokens"), place), _lists(batch.column("mask"), place), strict=True)
        return Unit(
            rows=tuple(TokenRow(tokens=tokens, mask=mask) for tokens, mask in rows),
            margin=batch.column("margin")[place].as_py(),
        )


def _lists(column: Any, place: int) -> Iterator[list[Any]]:
    for row in column[place].values:
        yield row.values.to_numpy(zero_copy_only=False).tolist()


class TokenCache:
    """The folder of all entries. most_bytes: what those that nobody reads may take together with the others; the ones
    that were read longest ago go first. Example::

        cache = TokenCache(default_folder(), most_bytes=50 << 30)
        table = cache.table(key, lambda add: about_rows(rows, add))
    """

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes

    def table(self, key: str, write: Callable[[Callable[[Unit], None]], About]) -> TokenTable:
        """The entry of that key; where there is none `write` makes it: it hands over one unit after the other.

        Only one process of a machine writes an entry, others wait for it. Raises what `write` raises, and ValueError
        where the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self._table(key, write)
        except OSError as error:
            raise ValueError(f"--data.cache_dir {str(self.folder)!r}: {error}; give another folder") from error

    def _table(self, key: str, write: Callable[[Callable[[Unit], None]], About]) -> TokenTable:
        entry, told, deadline = self.folder / key, False, time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            lock = os.open(self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o666)
            if (entry / ABOUT).is_file():
                if _locked(lock, fcntl.LOCK_SH) and (entry / ABOUT).is_file():
                    os.utime(entry)
                    self._make_room()
                    return TokenTable(entry, lock)
            elif _locked(lock, fcntl.LOCK_EX):
                try:
                    if not (entry / ABOUT).is_file():
                        self._write(entry, write)
                finally:
                    os.close(lock)
                continue
            os.close(lock)
            if not told:
                log.info("another process tokenises %s: waiting for it", entry)
                told = True
            time.sleep(POLL_S)
        raise TimeoutError(f"no entry {key} within {WAIT_S:.0f} s, another process still holds it")

    def _write(self, entry: Path, write: Callable[[Callable[[Unit], None]], About]) -> None:
        new = entry.with_name(f".new-{entry.name}")
        shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
        new.mkdir()
        try:
            lengths: list[np.ndarray] = []
            with pa.OSFile(str(new / TOKENS), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
                waiting: list[Unit] = []

                def flush() -> None:
                    writer.write_batch(_batch(waiting))
                    lengths.append(np.array([unit.length for unit in waiting], dtype=np.int32))
                    waiting.clear()

                def add(unit: Unit) -> None:
                    waiting.append(unit)
                    if len(waiting) == BATCH:
                        flush()

                about = write(add)
                flush()
            np.save(new / LENGTHS, np.concatenate(lengths))
            (new / ABOUT).write_text(json.dumps(asdict(about)))
            for path in new.iterdir():  # what has the entry's name must be there after a power cut, too
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            new.rename(entry)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _make_room(self) -> None:
        """Remove the entries that were read longest ago and that nobody reads, until the rest is small enough."""
        entries = [path for path in self.folder.iterdir() if (path / ABOUT).is_file()]
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in entries}
        for path in sorted(entries, key=lambda path: path.stat().st_mtime):
            if sum(sizes.values()) <= self._most_bytes:
                return
            lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
            if _locked(lock, fcntl.LOCK_EX):  # its file stays, empty: others may wait for it
                shutil.rmtree(path, ignore_errors=True)
                del sizes[path]
            os.close(lock)


def default_folder() -> Path:
    """Of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openrlhf" / "tokens"


def key_of(rows: str, reader: UnitReader, *, limit: int) -> str:
    """What an entry is known by. rows: their digest. limit: of rows that are read."""
    own = {f.name: getattr(reader, f.name) for f in fields(reader) if f.name != "renderer"}
    renderer = reader.renderer
    tokenizer = renderer.tokenizer
    told = {
        "rows": rows,
        "limit": limit,
        "reader": {"kind": type(reader).__name__, **own},
        "apply_chat_template": renderer.apply_chat_template,
        "input_template": renderer.input_template,
        "special_tokens": renderer.special_tokens,
        "chat_template": tokenizer.chat_template,
        "day": str(date.today()) if "strftime_now" in str(tokenizer.chat_template) else "",
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "names": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """This package's reading of rows and that of chat templates: what they change changes the tokens."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(template.__file__).parent):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _batch(units: list[Unit]) -> Any:
    columns = {
        "tokens": [[row.tokens for row in unit.rows] for unit in units],
        "mask": [[row.mask for row in unit.rows] for unit in units],
        "margin": [unit.margin for unit in units],
    }
    return pa.record_batch(columns, schema=SCHEMA)


def _locked(descriptor: int, how: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return True
    return False
