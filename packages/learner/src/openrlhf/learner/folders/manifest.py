"""Which files of a folder runs wrote: `.openrlhf-files.json`, with how each looked when it was written.

A file that looks otherwise now was changed by its user and is not ours any more. Small files are compared by their
content, so a copied folder is recognised; large ones by size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrlhf.learner.folders.files import files_below, remove_empty_folders, replace_file, sync_directory

MANIFEST = ".openrlhf-files.json"
PREFIX = ".openrlhf-"
"""What the names of our own book-keeping begin with."""
NEW_PREFIX = f"{PREFIX}new-"
"""What is being written; a file or folder of this name is never complete."""
SMALL = 1 << 24
SECOND = 10**9


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a file looked when a run wrote it.

    part: what wrote it; an export replaces only files of an export. sha256: of a small file; before: what it was until
    then, in case its replacement was interrupted. grows: runs append to it, it is ours by its name.
    """

    part: str
    size: int = 0
    mtime_ns: int = 0
    sha256: str = ""
    before: str = ""
    grows: bool = False

    @staticmethod
    def of(path: Path, *, part: str) -> Look:
        """How a file looks now."""
        status = path.stat()
        digest = _digest(path) if status.st_size <= SMALL else ""
        return Look(part=part, size=status.st_size, mtime_ns=status.st_mtime_ns, sha256=digest)

    def fits(self, path: Path) -> bool:
        """Whether the file still is the one that was written."""
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return False
        if self.grows:
            return True
        if self.sha256:
            return status.st_size <= SMALL and _digest(path) in (self.sha256, self.before)
        if status.st_size != self.size:
            return False
        if status.st_mtime_ns % SECOND == 0:  # a file system may keep whole or even seconds only, and say so later
            return 0 <= self.mtime_ns - status.st_mtime_ns < 2 * SECOND
        return status.st_mtime_ns == self.mtime_ns


@dataclass
class Manifest:
    """The files of one folder, by relative path. moving: an export that is on its way into the folder."""

    folder: Path
    files: dict[str, Look] = field(default_factory=dict)
    moving: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The folder's manifest, an empty one where there is none. Raises ValueError for a file that is none."""
        path = folder / MANIFEST
        if not path.is_file():
            return Manifest(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            files = {name: Look(**look) for name, look in content["files"].items()}
            moving = content["moving"]
            if moving:
                moving["files"] = {name: Look(**look) for name, look in moving["files"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} is not what a run writes there: move it away") from error
        return Manifest(folder, files, moving)

    def write(self) -> None:
        """Put it on disk, old or new, never a part; without files it is removed."""
        if not self.files and not self.moving:
            (self.folder / MANIFEST).unlink(missing_ok=True)
            sync_directory(self.folder)
            return
        moving: dict[str, Any] = dict(self.moving)
        if moving:
            moving["files"] = _plain(moving["files"])
        content = {"written_by": "openrlhf", "files": _plain(self.files), "moving": moving}
        replace_file(self.folder / MANIFEST, json.dumps(content, indent=1, sort_keys=True) + "\n")

    def owns(self, name: str) -> bool:
        """Whether a run wrote this file and it is unchanged. False for one that is not there."""
        look = self.files.get(name)
        return look is not None and os.path.lexists(self.folder / name) and look.fits(self.folder / name)

    def foreign(self, names: list[str]) -> list[str]:
        """Those of the names that are taken by something that no run wrote, or that was changed since."""
        return [name for name in names if _taken(self.folder, name) and not self.owns(name)]

    def note(self, name: str, *, part: str, grows: bool = False) -> None:
        """Record a file that was just written (or is about to grow)."""
        self.files[name] = Look(part=part, grows=True) if grows else Look.of(self.folder / name, part=part)

    def note_text(self, name: str, text: str, *, part: str) -> None:
        """Record a small file that is about to be written; until then its present content is ours, too."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        before = _digest(self.folder / name) if self.owns(name) else ""
        self.files[name] = Look(part=part, size=len(text.encode()), sha256=digest, before=before)

    @staticmethod
    def of_tree(folder: Path, *, part: str) -> Manifest:
        """A manifest of everything below a folder that a run made and filled."""
        names = [name for name in files_below(folder) if not is_book_keeping(name)]
        return Manifest(folder, {name: Look.of(folder / name, part=part) for name in names})


def is_book_keeping(name: str) -> bool:
    """Whether a path is one of our own, by its last part."""
    return Path(name).name.startswith(PREFIX)


def discard(folder: Path) -> None:
    """Remove a folder that one of our processes was filling; its manifest goes last, so that this can be finished."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MANIFEST:
            path.unlink(missing_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def remove_own(folder: Path, *, first: str = "") -> list[str]:
    """Remove what runs wrote below `folder`, and the folder itself if nothing else is in it; returns what stays.

    Subfolders with a manifest of their own are treated by it. first: the file whose absence makes the folder count as
    gone; it is removed before the others, the manifest last, so that an interrupted removal can be finished.
    """
    manifest = Manifest.read(folder)
    for nested in sorted(folder.rglob(MANIFEST), key=lambda path: len(path.parts), reverse=True):
        if nested.parent == folder or not nested.exists():
            continue
        if nested.parent.name.startswith(NEW_PREFIX):  # half-written by a killed process
            discard(nested.parent)
        else:
            remove_own(nested.parent)
    own = [name for name in manifest.files if manifest.owns(name)]
    for name in sorted(own, key=lambda name: name != first):
        (folder / name).unlink(missing_ok=True)
    remove_empty_folders(folder, own)
    left = [name for name in files_below(folder) if name != MANIFEST]
    (folder / MANIFEST).unlink(missing_ok=True)
    if not left:
        _remove_empty_tree(folder)
    return left


def _remove_empty_tree(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(path)
        except OSError:  # a mount point
            return


def _taken(folder: Path, name: str) -> bool:
    """Whether the name, or a folder on the way to it, is something else than a folder that may be written into."""
    way = folder
    for part in Path(name).parts[:-1]:
        way = way / part
        if os.path.lexists(way) and not way.is_dir():
            return True
    return os.path.lexists(folder / name)


def _plain(files: dict[str, Look]) -> dict[str, dict[str, Any]]:
    return {name: {k: v for k, v in vars(look).items() if v} for name, look in files.items()}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
