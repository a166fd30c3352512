"""Directories that are complete or absent. Pure Python."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"
"""Marks what is being written; a directory with this in its name is never complete."""


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """A fresh directory to write into, which takes the place of `target` when the block ends without an error.

    Everything in it is on disk (fsync) before one rename makes it visible. An existing `target` steps aside just
    before that and is deleted after it. An error leaves `target` as it was.
    """
    target = Path(os.path.abspath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.parent / f"{TEMPORARY}{target.name}-{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        sync_tree(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    old = target.parent / f"{TEMPORARY}old-{target.name}-{os.getpid()}"
    if target.exists():
        os.rename(target, old)
    os.rename(fresh, target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_tree(root: Path) -> None:
    """fsync every file and directory under `root`."""
    for folder, _, files in os.walk(root):
        for name in files:
            with open(os.path.join(folder, name), "rb") as handle:
                os.fsync(handle.fileno())
        sync_directory(Path(folder))


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names in it survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
