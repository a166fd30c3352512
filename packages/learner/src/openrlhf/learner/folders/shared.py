"""Whether all processes of a run see the same folder: on another node the same path may be a disk of its own."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from openrlhf.learner.folders.files import files_below
from openrlhf.learner.folders.manifest import NEW_PREFIX

PATIENCE = 10.0
"""Seconds that a file may take from one node of a network file system to another."""
POLL = 0.2
NAMED = 3
"""Files that a message names."""


@contextmanager
def mark(folder: Path) -> Iterator[str]:
    """A new file in an existing folder for the length of the block; its name, to be looked for with `sees`."""
    path = folder / f"{NEW_PREFIX}{secrets.token_hex(8)}"
    path.touch(exist_ok=False)
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def sees(path: str | Path, *, patience: float = PATIENCE) -> bool:
    """Whether a file is there, or comes within so many seconds."""
    return not missing(Path(path).parent, {Path(path).name: 0}, patience=patience)


def host() -> str:
    """How a message names this machine."""
    return socket.gethostname()


def sizes_below(folder: Path) -> dict[str, int]:
    """The files below a folder, by their path in it, in bytes: what this process knows to be written."""
    return {name: os.lstat(folder / name).st_size for name in files_below(folder)}


def together(seen: Iterable[Mapping[str, int]], place: str) -> dict[str, int]:
    """What several processes know of the same folder, by path in the folder above: each file as large as any saw it."""
    found: dict[str, int] = {}
    for name, size in (item for files in seen for item in files.items()):
        found[f"{place}/{name}"] = max(found.get(f"{place}/{name}", 0), size)
    return found


def missing(folder: Path, written: Mapping[str, int], *, patience: float = PATIENCE) -> list[str]:
    """Which of these files are not in the folder, or smaller than they were written, after so many seconds."""
    until = time.monotonic() + patience
    left = sorted(written)
    while True:
        left = [name for name in left if _size(folder / name) < written[name]]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(POLL)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1


def named(names: list[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
