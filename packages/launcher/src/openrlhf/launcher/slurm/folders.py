"""Ray's temporary folder of a job on a node: short, its own, removed at the end, also by the next job if need be."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from openrlhf.launcher.ray.node import ROOM
from openrlhf.launcher.ray.scratch import try_lock

LOCKS = ".openrlhf-*.lock"
"""The locks of a job's nodes in its folder; a folder without one was not made by a job, and is never removed."""


def choose_temp_dir(job_id: int, environ: Mapping[str, str], given: str = "") -> tuple[Path, str]:
    """Ray's folder for a job and a note, empty if there is nothing to say. Creates nothing.

    `--temp-dir` must be short enough (ValueError); $SLURM_TMPDIR and $TMPDIR are used where they are, else /tmp.
    """
    name = f"r{job_id}"
    room = ROOM - len(name) - 1
    if given:
        if len(os.fsencode(given)) > room:
            raise ValueError(f"--temp-dir {given!r} is too long for Ray's sockets: at most {room} characters")
        return Path(given) / name, ""
    for variable in ("SLURM_TMPDIR", "TMPDIR"):
        root = environ.get(variable, "")
        if root and len(os.fsencode(root)) <= room:
            return Path(root) / name, ""
        if root:
            note = f"{variable}={root!r} is too long for Ray's sockets (at most {room} characters): using /tmp"
            return Path("/tmp") / name, note
    return Path("/tmp") / name, ""


class TempDir:
    """A job's folder on this node, held by a lock that ends with this process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Create the folder for this user alone. Raises ValueError if another user, or something else, has it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise ValueError(f"{str(path)!r} belongs to another user: give another --temp-dir")
        if any(path.iterdir()) and not list(path.glob(LOCKS)):
            raise ValueError(f"{str(path)!r} holds files that no job put there: give another --temp-dir")
        self.path = path
        self._lock = try_lock(path / LOCKS.replace("*", socket.gethostname()))

    def close(self) -> None:
        """Remove the folder, unless another node of the job shares it and still works."""
        if self._lock is not None:
            Path(self._lock.name).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        if not _in_use(self.path):
            shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned(root: Path) -> list[Path]:
    """Remove this user's folders of jobs that were killed before they could clean up. Returns them."""
    removed = []
    for path in root.iterdir():
        if not re.fullmatch(r"r\d+", path.name) or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        if list(path.glob(LOCKS)) and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _in_use(path: Path) -> bool:
    for lock in path.glob(LOCKS):
        handle = try_lock(lock)
        if handle is None:
            return True
        handle.close()
    return False
