"""A temporary folder of an engine's process: vLLM leaves sockets and rendezvous files in the machine's own.

Inside the run's folder where the run started its own Ray, so it goes with that whatever ends the run; elsewhere the
process removes it, and the next engine on the machine removes what a killed one left.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

ROOT_VARIABLE = "OPENRLHF_SCRATCH"
"""The run's own folder, in the environment of its workers."""
PREFIX = "vllm-"
LOCK = "lock"
LONGEST_SOCKET_PATH = 107
"""Linux' limit for the path of a UNIX socket."""
LONGEST_ROOT = LONGEST_SOCKET_PATH - len(f"/{PREFIX}01234567/") - 36
"""Less our folder's name and vLLM's UUIDs."""


class Scratch:
    """The folder, held by a lock for the life of this process or until `close`. path: where it lies."""

    def __init__(self) -> None:
        root = os.environ.get(ROOT_VARIABLE, "")
        if not os.path.isdir(root):  # a machine that joined the run has no such folder
            root = tempfile.gettempdir()
        root = Path(root if len(root) <= LONGEST_ROOT else "/tmp")
        remove_stale(root)
        self.path = root / f"{PREFIX}{secrets.token_hex(4)}"
        nascent = self.path.with_name(f".{self.path.name}")  # gets its name with its lock, so it is never stale
        nascent.mkdir(mode=0o700)
        self._lock = locked(nascent / LOCK)
        nascent.rename(self.path)

    def use(self) -> None:
        """Make it the temporary folder of this process and its children."""
        os.environ["TMPDIR"] = str(self.path)
        tempfile.tempdir = None  # Python remembers the folder from before

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_stale(root: Path) -> None:
    """Remove folders of processes that were killed: nobody holds their lock. Others' folders are left alone."""
    for folder in root.glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid() or not (folder / LOCK).exists():
                continue
            lock = locked(folder / LOCK)
        except OSError:  # gone meanwhile, or in use
            continue
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def locked(path: Path) -> TextIO:
    """The file, locked by this process until it ends or closes it. Raises BlockingIOError when another one holds it."""
    handle = path.open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise
    return handle


def try_lock(path: Path) -> TextIO | None:
    """The file, locked as by `locked`; None where another process holds it."""
    try:
        return locked(path)
    except BlockingIOError:
        return None
