"""Checkpoints in a folder: each complete or absent, the oldest rotated away. Pure Python."""

from __future__ import annotations

import filecmp
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openrlhf.learner.folders.files import (
    exchange,
    files_below,
    remove_empty_folders,
    replace_file,
    sync_directory,
    sync_tree,
    tree_size,
    usual_modes,
)
from openrlhf.learner.folders.manifest import MANIFEST, NEW_PREFIX, PREFIX, Manifest, discard, remove_own
from openrlhf.learner.folders.shared import host, missing, named

log = logging.getLogger(__name__)

TEMPORARY = NEW_PREFIX
"""Marks what is being written; a directory with this in its name is never complete."""
OLD = f"{PREFIX}old-"
"""Marks a checkpoint that a newer one of the same step is taking the place of."""
PART = "checkpoint"


@contextmanager
def fresh_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `target`, not there before, when the block ends without an error."""
    fresh = target.parent / f"{TEMPORARY}{target.name}"
    if fresh.exists() and (fresh / MANIFEST).is_file():
        discard(fresh)  # of a process that was killed
    fresh.mkdir()
    Manifest(fresh, moving={"files": {}}).write()
    try:
        yield fresh
        seal(fresh)
        os.rename(fresh, target)
    except BaseException:
        discard(fresh)
        raise
    sync_directory(target.parent)


def seal(folder: Path) -> None:
    """Record everything in a folder that is about to get its name, with usual modes, and bring it to disk."""
    usual_modes(folder, like=folder / MANIFEST)
    Manifest.of_tree(folder, part=PART).write()
    sync_tree(folder)


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
    are never deleted, whatever the limits; nor is a file that a user put into a checkpoint.

    Whoever writes holds the folder (`folders.lock`).

    Example: pending = store.begin(7); write into it; store.commit(7, metric=0.9)
    """

    def __init__(self, root: Path, *, max_num: int = 3, max_bytes: float = float("inf")) -> None:
        if max_num < 1:
            raise ValueError(f"`store.max_num` must be at least 1, got {max_num!r}")
        self.root = Path(os.path.realpath(root))
        self.max_num = max_num
        self.max_bytes = max_bytes

    def check(self, *, resume: bool = False) -> None:
        """ValueError when a checkpoint that is to come would have to replace what no run wrote.

        resume: the run goes on from the newest one, so that only later steps come.
        """
        newest = self.latest() if resume else None
        for path in self.root.glob("global_step*"):
            match = STEP_NAME.fullmatch(path.name)
            if match is None or (newest is not None and int(match[1]) <= newest.step):
                continue
            if not path.is_dir() or _conflicts(path):
                raise ValueError(
                    f"{str(path)!r} has the name of a checkpoint and holds what no run wrote or was changed since: "
                    "move it away, give another `store.path`, or resume from it if it is one (`store.resume`)"
                )

    def begin(self, step: int) -> Path:
        """A fresh folder for this step, to be filled and then committed. What an interrupted run left is removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.recover()
        pending = self.pending(step)
        pending.mkdir()
        Manifest(pending, moving={"files": {}}).write()
        return pending

    def commit(self, step: int, *, metric: float | None = None, written: Mapping[str, int] | None = None) -> Path:
        """Make the folder of `begin` the newest checkpoint, then rotate.

        written: files that its writers saw in it, with their bytes. Raises ValueError where one of them is not here: a
        writer sees another folder. The checkpoints before stay.
        """
        pending, target = self.pending(step), self.root / f"global_step{step}"
        if left := missing(pending, written or {}):
            raise ValueError(
                f"the checkpoint of step {step} is not whole: ranks wrote {named(left)}, which {host()!r} does not see "
                f"in {str(pending)!r}. `store.path` must be a folder that all nodes share"
            )
        (pending / METRIC_FILE).write_text(json.dumps({"step": step, "metric": metric}) + "\n")
        seal(pending)
        if target.exists():
            self._replace(pending, target)
        else:
            os.rename(pending, target)
            sync_directory(self.root)
        pointer = self.root / LATEST_FILE
        if not os.path.lexists(pointer) or STEP_NAME.fullmatch(pointer.read_text().strip()):
            replace_file(pointer, target.name + "\n")
        self._rotate(keep=step)
        return target

    def _replace(self, pending: Path, target: Path) -> None:
        """At one moment where the file system can swap two names; else `checkpoints` finds the old one meanwhile."""
        _carry_over(target, pending)
        old = pending
        if not exchange(pending, target):
            old = self.root / f"{OLD}{target.name}"
            os.rename(target, old)
            os.rename(pending, target)
        sync_directory(self.root)
        _drop(old, target)

    def recover(self) -> None:
        """Finish what an interrupted run began: half-written checkpoints go, one that stepped aside comes back."""
        if not self.root.is_dir():
            return
        for path in sorted(self.root.glob(f"{PREFIX}*global_step*"), reverse=True):  # the old ones first
            match = _IN_THE_WAY.fullmatch(path.name)
            if match is None or not path.is_dir() or path.is_symlink():
                continue
            target = self.root / match[2]
            if match[1] == OLD and not target.exists():
                os.rename(path, target)
            elif not (path / MANIFEST).is_file():
                _remove_twins(path, target)  # a folder of the user's alone, whose place a checkpoint has taken
            elif Manifest.read(path).moving:
                discard(path)
            else:
                _drop(path, target)
        for path in self.root.glob("global_step*"):
            if STEP_NAME.fullmatch(path.name) and (path / MANIFEST).is_file() and not (path / METRIC_FILE).is_file():
                remove_own(path)
        sync_directory(self.root)

    def checkpoints(self) -> list[Checkpoint]:
        """All complete checkpoints by rising step."""
        found = {}
        for path in [*self.root.glob(f"{OLD}global_step*"), *self.root.glob("global_step*")]:
            match = STEP_NAME.fullmatch(path.name.removeprefix(OLD))
            if match is None or not (path / METRIC_FILE).is_file():
                continue
            metric = json.loads((path / METRIC_FILE).read_text())["metric"]
            found[int(match[1])] = Checkpoint(path=path, step=int(match[1]), metric=metric, size=tree_size(path))
        return sorted(found.values(), key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; the pointer decides, and without a valid one the highest step."""
        found = self.checkpoints()
        pointer = self.root / LATEST_FILE
        named = pointer.read_text().strip() if pointer.is_file() else ""
        return next((c for c in found if c.path.name == named), found[-1] if found else None)

    def unfinished(self) -> list[Path]:
        """Folders that an interrupted save left, by name; the next `begin` removes them."""
        return [path for path in sorted(self.root.glob(f"{TEMPORARY}global_step*")) if _unfinished(path)]

    def best(self) -> Checkpoint | None:
        """The checkpoint with the highest metric, the newer of equals; None when none has one."""
        rated = [c for c in self.checkpoints() if c.metric is not None]
        return max(rated, key=lambda c: (c.metric, c.step), default=None)

    def pending(self, step: int) -> Path:
        """The folder that `begin` makes."""
        return self.root / f"{TEMPORARY}global_step{step}"

    def _rotate(self, keep: int) -> None:
        best = self.best()
        kept = [c for c in self.checkpoints() if (c.path / MANIFEST).is_file()]  # without one we know no file of it

        def key(c: Checkpoint) -> tuple[bool, float, int]:
            return (c.metric is not None, c.metric if c.metric is not None else 0.0, c.step)

        spare = sorted((c for c in kept if c.step != keep and (best is None or c.step != best.step)), key=key)
        for checkpoint in spare:
            others = len(kept) - (best is not None)
            if others <= self.max_num and sum(c.size for c in kept) <= self.max_bytes:
                return
            # Its metric goes first: a deletion that is interrupted must not leave half a checkpoint that looks whole.
            left = remove_own(checkpoint.path, first=METRIC_FILE)
            if left:
                log.warning("%s was rotated away; %s, which no run wrote, stays", checkpoint.path, ", ".join(left))
            kept.remove(checkpoint)


_IN_THE_WAY = re.compile(rf"({re.escape(TEMPORARY)}|{re.escape(OLD)})(global_step\d+)")


def _unfinished(path: Path) -> bool:
    return (path / MANIFEST).is_file() and bool(Manifest.read(path).moving)


def _foreign(checkpoint: Path) -> list[str]:
    """Files of a checkpoint that no run wrote, or that were changed since."""
    known: set[str] = set()
    for path in [checkpoint / MANIFEST, *checkpoint.glob(f"*/{MANIFEST}"), *checkpoint.glob(f"*/*/{MANIFEST}")]:
        if path.is_file():
            manifest, folder = Manifest.read(path.parent), path.parent.relative_to(checkpoint)
            known |= {str(folder / name) for name in manifest.files if manifest.owns(name)}
            known.add(str(folder / MANIFEST))
    half = f"/{TEMPORARY}"
    return [name for name in files_below(checkpoint) if name not in known and half not in f"/{name}"]


def _conflicts(checkpoint: Path) -> bool:
    """Whether another checkpoint of the same step would find a foreign file in the place of one of its own."""
    own, foreign = Manifest.read(checkpoint).files, _foreign(checkpoint)
    return bool(foreign) if not own else not own.keys().isdisjoint(foreign)


def _carry_over(old: Path, new: Path) -> None:
    """Give the files that no run wrote a second name in the new checkpoint, so that they are never without one."""
    for name in _foreign(old):
        if os.path.lexists(new / name):
            raise ValueError(f"{str(old / name)!r} was not written by a run and is in the way of a checkpoint's file")
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old / name, new / name, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def _remove_twins(old: Path, new: Path) -> None:
    """Remove the files of `old` that are in `new`, too, and `old` when nothing else is in it."""
    names = files_below(old)
    for name in names:
        half_written = Path(name).name.startswith(TEMPORARY)  # a manifest, by a process that was killed
        if half_written or ((new / name).is_file() and filecmp.cmp(old / name, new / name, shallow=False)):
            (old / name).unlink()
    remove_empty_folders(old, names)
    if not any(old.iterdir()):
        old.rmdir()


def _drop(old: Path, new: Path) -> None:
    """Remove a checkpoint whose place is taken; files that no run wrote are in the new one, too."""
    for name in _foreign(old):
        if os.path.lexists(new / name):
            (old / name).unlink()
        elif new.is_dir():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(old / name, new / name)
    remove_own(old, first=METRIC_FILE)
