"""Directories that are complete or absent. Pure Python."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


METRIC_FILE = "metric.json"
LATEST_FILE = "latest"
STEP_NAME = re.compile(r"global_step(\d+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint. metric: higher is better, None when it was not evaluated."""

    path: Path
    step: int
    metric: float | None
    size: int


class CheckpointStore:
    """The checkpoints under one folder: `global_step{N}`, each complete or absent, the oldest rotated away.

    max_num: how many to keep besides the best one. max_bytes: how much they may take together. The best and the newest
    are never deleted, whatever the limits.

    Example: pending = store.begin(7); write into it; store.commit(7, metric=0.9)
    """

    def __init__(self, root: Path, *, max_num: int = 3, max_bytes: float = float("inf")) -> None:
        if max_num < 1:
            raise ValueError(f"--ckpt.max_num must be at least 1, got {max_num!r}")
        self.root = Path(os.path.abspath(root))
        self.max_num = max_num
        self.max_bytes = max_bytes

    def begin(self, step: int) -> Path:
        """A fresh folder for this step, to be filled and then committed. What an interrupted run left is removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        pending = self.pending(step)
        pending.mkdir()
        return pending

    def commit(self, step: int, *, metric: float | None = None) -> Path:
        """Make the folder of `begin` the newest checkpoint, then rotate."""
        pending, target = self.pending(step), self.root / f"global_step{step}"
        (pending / METRIC_FILE).write_text(json.dumps({"step": step, "metric": metric}) + "\n")
        sync_tree(pending)
        old = self.root / f"{TEMPORARY}old-{target.name}"
        if target.exists():
            os.rename(target, old)
        os.rename(pending, target)
        sync_directory(self.root)
        replace_file(self.root / LATEST_FILE, target.name + "\n")
        shutil.rmtree(old, ignore_errors=True)
        self._rotate(keep=step)
        return target

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints by rising step."""
        found = []
        for path in self.root.glob("global_step*"):
            match = STEP_NAME.fullmatch(path.name)
            if match is None or not (path / METRIC_FILE).is_file():
                continue
            metric = json.loads((path / METRIC_FILE).read_text())["metric"]
            found.append(Checkpoint(path=path, step=int(match[1]), metric=metric, size=tree_size(path)))
        return sorted(found, key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; the pointer decides, and without a valid one the highest step."""
        found = self.checkpoints()
        pointer = self.root / LATEST_FILE
        named = pointer.read_text().strip() if pointer.is_file() else ""
        return next((c for c in found if c.path.name == named), found[-1] if found else None)

    def unfinished(self) -> list[Path]:
        """Folders that an interrupted save left, by name; the next `begin` removes them."""
        return sorted(self.root.glob(f"{TEMPORARY}global_step*"))

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest metric, the newer of equals; None when none has one."""
        rated = [c for c in self.checkpoints() if c.metric is not None]
        return max(rated, key=lambda c: (c.metric, c.step), default=None)

    def pending(self, step: int) -> Path:
        """The folder that `begin` makes."""
        return self.root / f"{TEMPORARY}global_step{step}"

    def _rotate(self, keep: int) -> None:
        best = self.best()
        kept = self.checkpoints()

        def key(c: Checkpoint) -> tuple[bool, float, int]:
            return (c.metric is not None, c.metric if c.metric is not None else 0.0, c.step)

        spare = sorted((c for c in kept if c.step != keep and (best is None or c.step != best.step)), key=key)
        for checkpoint in spare:
            others = len(kept) - (best is not None)
            if others <= self.max_num and sum(c.size for c in kept) <= self.max_bytes:
                return
            # Renamed first: a deletion that is interrupted must not leave half a checkpoint under a valid name.
            doomed = self.root / f"{TEMPORARY}old-{checkpoint.path.name}"
            os.rename(checkpoint.path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            kept.remove(checkpoint)


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that readers see the old or the new content, never a part."""
    fresh = path.parent / f"{TEMPORARY}{path.name}"
    with open(fresh, "w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(fresh, path)
    sync_directory(path.parent)


def tree_size(root: Path) -> int:
    """Bytes of all files under `root`."""
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, files in os.walk(root) for name in files)
