"""Putting a set of files into a folder that may hold other things: each complete or absent, the manifest last.

The files are written into a hidden folder inside the target (so they are on its disk, be it a mount point or behind a
link), brought to disk, and then moved to their names. The file without which nobody takes the folder for a model
(`config.json`, `adapter_config.json`) is removed before the move and comes last: a reader sees the old model, none, or
the new one. The manifest says what is on its way, so that a move that was interrupted is finished by the next run.

Callers hold the folder (`lock.hold`), or one above it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrlhf.learner.folders.files import (
    move_file,
    remove_empty_folders,
    replace_file,
    sync_directory,
    sync_tree,
    usual_modes,
)
from openrlhf.learner.folders.lock import make_folders
from openrlhf.learner.folders.manifest import MANIFEST, NEW_PREFIX, Manifest, discard

log = logging.getLogger(__name__)

EXPORT = "export"
HEADS = ("config.json", "adapter_config.json")
"""Files that make a folder a model: gone first, back last."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", *HEADS)
"""What would be loaded together with an export, or instead of it, if somebody else's were left beside it."""
_OURS = re.compile(rf"{re.escape(NEW_PREFIX)}[0-9a-f]{{16}}")


@contextmanager
def publish(target: str | Path, *, trial: bool = False, name: str = "the output folder") -> Iterator[Path]:
    """A fresh folder to write into, whose files take their places in `target` when the block ends without an error.

    Files of an earlier export are replaced, all others stay. trial: write, check and remove again, `target` keeps what
    it has. An error in the block leaves `target` as it was.

    Raises:
        ValueError: trial, and something in `target` that no run wrote is in the way. Without trial the files then go
            into a new folder inside it, with a warning: a trained model is not lost for that.
    """
    folder = Path(os.path.realpath(Path(target).expanduser()))
    made = make_folders(folder)
    recover(folder)
    fresh = folder / f"{NEW_PREFIX}{secrets.token_hex(8)}"
    try:
        fresh.mkdir()
        (fresh / MANIFEST).write_text(json.dumps({"written_by": "openrlhf", "files": {}, "moving": {}}) + "\n")
        yield fresh
        usual_modes(fresh, like=fresh / MANIFEST)
        arriving = Manifest.of_tree(fresh, part=EXPORT)
        trouble = in_the_way(folder, list(arriving.files))
        if trial and trouble:
            raise ValueError(taken_message(folder, trouble, name))
        sync_tree(fresh)
    except BaseException:
        _discard(fresh, made)
        raise
    if trial:
        _discard(fresh, made)
    elif trouble:
        _set_aside(folder, fresh, arriving, trouble)
    else:
        _move_in(folder, fresh, arriving)


def _discard(fresh: Path, made: list[Path]) -> None:
    discard(fresh)
    for path in reversed(made):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def in_the_way(folder: Path, names: list[str]) -> list[str]:
    """What no run wrote in `folder` and an export of these files would replace, or would be loaded together with."""
    manifest = Manifest.read(folder)
    parents = {Path(name).parent for name in names} | {Path()}
    beside = {
        os.path.relpath(path, folder)
        for parent in parents
        for pattern in WEIGHTS
        for path in (folder / parent).glob(pattern)
    }
    return manifest.foreign(sorted({*names, *beside}))


def taken_message(folder: Path, names: list[str], name: str) -> str:
    """Why an export into the folder is refused, and what to do."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{name} {str(folder)!r} holds files that no run wrote, or that were changed since one did, where the export "
        f"would write its own: {shown}. Give another folder, or move them away"
    )


def recover(folder: Path) -> None:
    """Finish a move that was interrupted, and remove what a killed run was still writing."""
    manifest = Manifest.read(folder)
    if manifest.moving:
        log.warning("%s: finishing an export that was interrupted", folder)
        _roll_forward(manifest)
    for path in folder.glob(f"{NEW_PREFIX}*"):
        if _OURS.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            if (path / MANIFEST).is_file():
                discard(path)
            elif not any(path.iterdir()):
                path.rmdir()


def write_text(folder: Path, names: tuple[str, ...], text: str, *, part: str) -> Path:
    """Write a small file under the first of the names that is free or ours, and record it. Returns its path.

    Raises ValueError when all names are taken.
    """
    folder = Path(os.path.realpath(folder))
    manifest = Manifest.read(folder)
    for name in names:
        if not manifest.foreign([name]):
            manifest.note_text(name, text, part=part)
            manifest.write()  # before the file: one that is ours without a record would be taken for the user's
            replace_file(folder / name, text)
            return folder / name
    raise ValueError(f"{str(folder)!r} holds {' and '.join(names)} that no run wrote: give another folder")


def _set_aside(folder: Path, fresh: Path, arriving: Manifest, trouble: list[str]) -> None:
    """A folder of its own for a model whose place was taken while it was trained."""
    number = 1
    while (place := folder / f"export{number}").exists():
        number += 1
    log.warning("%s. The model is in %s instead", taken_message(folder, trouble, "the output folder"), place)
    arriving.write()
    os.rename(fresh, place)
    sync_directory(folder)


def _move_in(folder: Path, fresh: Path, arriving: Manifest) -> None:
    manifest = Manifest.read(folder)
    manifest.moving = {"from": fresh.name, "files": arriving.files}
    manifest.write()
    _roll_forward(manifest)


def _roll_forward(manifest: Manifest) -> None:
    """From `moving` to done; every step may have been taken before."""
    folder, fresh = manifest.folder, manifest.folder / manifest.moving["from"]
    arriving = manifest.moving["files"]
    there = Manifest(folder, arriving)
    old = {name for name, look in manifest.files.items() if look.part == EXPORT}
    waiting = [name for name in arriving if (fresh / name).is_file()]
    leaving = sorted(old & set(waiting) | old - arriving.keys(), key=_heads_first)
    for name in leaving:
        if (_is_head(name) or name not in arriving) and manifest.owns(name):
            (folder / name).unlink()
    for name in sorted(waiting, key=_heads_first, reverse=True):
        if manifest.foreign([name]) and not there.owns(name):
            log.warning("%s: %s was put there meanwhile and stays; it is not part of the export", folder, name)
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        move_file(fresh / name, folder / name)
    for parent in {(folder / name).parent for name in arriving}:
        if parent.is_dir():
            sync_directory(parent)
    remove_empty_folders(folder, sorted(old - arriving.keys()))
    manifest.files = {name: look for name, look in manifest.files.items() if name not in old}
    manifest.files |= {name: look for name, look in arriving.items() if there.owns(name)}
    manifest.moving = {}
    manifest.write()
    discard(fresh)


def _is_head(name: str) -> bool:
    return Path(name).name in HEADS


def _heads_first(name: str) -> tuple[bool, str]:
    return not _is_head(name), name
