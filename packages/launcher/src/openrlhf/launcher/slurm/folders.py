"""Ray's temporary folder of a job on a node: short, its own, removed at the end, also by the next job if need be."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO

LONGEST_SOCKET_PATH = 107
"""Linux' limit for the path of a UNIX socket."""
SOCKET_SUFFIX = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""What Ray adds to its folder, with the widest process id."""
MARGIN = 4
"""Ray numbers the sockets of further nodes on one machine: plasma_store_1."""
LOCKS = ".openrlhf-*.lock"
"""The locks of a job's nodes in its folder; a folder without one was not made by a job, and is never removed."""


def choose_temp_dir(job_id: int, environ: Mapping[str, str], given: str = "") -> tuple[Path, str]:
    """Ray's folder for a job and a note, empty if there is nothing to say. Creates nothing.

    `--temp-dir` must be short enough (ValueError); $SLURM_TMPDIR and $TMPDIR are used where they are, else /tmp.
    """
    name = f"r{job_id}"
    if given:
        if not fits(f"{given}/{name}"):
            raise ValueError(f"--temp-dir {given!r} is too long for Ray's sockets: at most {_room(name)} characters")
        return Path(given) / name, ""
    for variable in ("SLURM_TMPDIR", "TMPDIR"):
        root = environ.get(variable, "")
        if root and fits(f"{root}/{name}"):
            return Path(root) / name, ""
        if root:
            note = f"{variable}={root!r} is too long for Ray's sockets (at most {_room(name)} characters): using /tmp"
            return Path("/tmp") / name, note
    return Path("/tmp") / name, ""


def fits(folder: str) -> bool:
    """Whether Ray's sockets fit below `folder`."""
    return len(os.fsencode(folder)) + len(SOCKET_SUFFIX) + MARGIN <= LONGEST_SOCKET_PATH


def _room(name: str) -> int:
    return LONGEST_SOCKET_PATH - len(SOCKET_SUFFIX) - MARGIN - len(name) - 1


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
        self._lock = _lock(path / LOCKS.replace("*", socket.gethostname()))

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
        handle = _lock(lock)
        if handle is None:
            return True
        handle.close()
    return False


def _lock(path: Path) -> IO[str] | None:
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def object_store_bytes() -> int:
    """A fifth of the free shared memory, between 200 MiB and 8 GiB: trajectories are small."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 1 << 30
    return int(min(max(free // 5, 200 << 20), 8 << 30))
