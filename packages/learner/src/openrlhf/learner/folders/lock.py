"""A folder in use belongs to one run: `.openrlhf-lock` in it, held by an flock that ends with the process.

What it covers. On one machine, also between containers: exactly, whatever ends the holder, SIGKILL too. Between nodes
with a shared disk: exactly where the file system shares flock between its clients (NFS 4, Lustre with `-o flock`, GPFS,
CephFS); elsewhere by a sign of life, since the holder touches the file every BEAT seconds: a run that finds the lock
free but the mark of a run on another machine waits until that has been silent for SILENCE seconds. Where there is no
flock at all, the sign of life decides alone; two runs that start within a second of each other may then miss each
other. Folders of nodes that share no disk are different folders.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

LOCK = ".openrlhf-lock"
BEAT = 10.0
SILENCE = 60.0
"""Seconds without a sign of life after which a run on another machine counts as dead."""
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
AGREEMENT = 1.0
"""Without flock: after so many seconds the mark of whoever signed last stands, and only that run goes on."""
_LEFTOVER = re.compile(r"\.openrlhf-new-[0-9a-f]{8}")


class FolderInUseError(ValueError):
    """Another live run writes into the folder."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a folder; what `.openrlhf-lock` says. boot: the kernel it runs on, also from inside a container."""

    user: str
    pid: int
    host: str
    boot: str
    program: str
    since: str

    @staticmethod
    def me() -> Holder:
        """This process."""
        return Holder(
            user=_user(),
            pid=os.getpid(),
            host=socket.gethostname(),
            boot=_boot_id(),
            program=Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python",
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def __str__(self) -> str:
        return f"{self.program} of {self.user}, process {self.pid} on {self.host}, since {self.since}"


class FolderLock:
    """A folder that this process holds, until `release` or its end."""

    def __init__(self, folder: Path, handle: int, made: list[Path]) -> None:
        self.folder = folder
        self.users = 1
        self._handle = handle
        self._made = made
        self._ended = threading.Event()
        threading.Thread(target=self._live, name=f"lock of {folder}", daemon=True).start()

    def release(self) -> None:
        """Give the folder back; our mark goes, and so do folders that we made for it and nobody filled."""
        self.users -= 1
        if self.users or self._ended.is_set():
            return
        self._ended.set()
        _held.pop(_identity(self.folder), None)
        (self.folder / LOCK).unlink(missing_ok=True)  # while it is held: whoever waits sees that its file is gone
        os.close(self._handle)
        for path in reversed(self._made):
            if not path.is_dir() or any(path.iterdir()):
                break
            path.rmdir()

    def forget(self) -> None:
        """In a forked child: the lock is its parent's, and ends with that."""
        self._ended.set()
        os.close(self._handle)

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                os.utime(self.folder / LOCK)
            except OSError as error:
                log.warning("%s: no sign of life can be given (%s)", self.folder, error)
                return


_held: dict[tuple[int, int], FolderLock] = {}


def hold(folder: str | Path, name: str, *, silence: float = SILENCE) -> FolderLock:
    """Take the folder, made if need be, for this run; what dead runs left half-written in it is removed.

    name: how the user calls the folder, for the error. A process may take a folder several times.

    Raises:
        FolderInUseError: another live run has it; the error names that run.
        ValueError: it cannot be made or written.
    """
    path = Path(os.path.realpath(Path(folder).expanduser()))
    made: list[Path] = []
    try:
        made = make_folders(path)
        held = _held.get(_identity(path))
        if held is not None:
            held.users += 1
            return held
        handle = _take(path, name, silence)
    except BaseException as error:
        for fresh in reversed(made):
            if not any(fresh.iterdir()):
                fresh.rmdir()
        if isinstance(error, OSError):
            raise ValueError(f"{name} {str(path)!r} cannot be written: {error.strerror or error}") from error
        raise
    lock = _held[_identity(path)] = FolderLock(path, handle, made)
    _remove_leftovers(path)
    return lock


def make_folders(path: Path) -> list[Path]:
    """Make the folder and its missing parents; returns those that were missing, outermost first."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    made = []
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        made.append(folder)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder", str(path))
    return made


def _take(folder: Path, name: str, silence: float) -> int:
    """The open lock file, locked and signed."""
    handle, exact = _open_locked(folder, name)
    try:
        other = _read(folder / LOCK)
        if other is not None and not (exact and other.boot == _boot_id()):
            _wait_for_silence(folder, name, other, silence)
        me = Holder.me()
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps(vars(me)) + "\n").encode(), 0)
        os.fsync(handle)
        if not exact:
            time.sleep(AGREEMENT)
            if _read(folder / LOCK) != me:
                raise _in_use(folder, name)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open_locked(folder: Path, name: str) -> tuple[int, bool]:
    """The open lock file, and whether an flock holds it; False where there is no flock."""
    path = folder / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            exact = _flock(handle)
        except BlockingIOError:
            os.close(handle)
            raise _in_use(folder, name) from None
        if _is_at(handle, path):
            return handle, exact
        os.close(handle)  # its holder has just ended and removed it: take the next one


def _flock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_FLOCK:
            return False
        raise
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (mine.st_dev, mine.st_ino) == (status.st_dev, status.st_ino)


def _wait_for_silence(folder: Path, name: str, other: Holder, silence: float) -> None:
    """Return when the holder has given no sign of life for `silence` seconds; raises FolderInUseError at one."""
    path = folder / LOCK
    seen = path.stat().st_mtime_ns
    left = silence - _age(folder, seen)
    if left > 0:
        log.warning("%s %s: %s holds it or was killed; waiting %.0f s for a sign of life", name, folder, other, left)
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        time.sleep(min(0.5, silence / 10))
        if not path.exists() or path.stat().st_mtime_ns != seen:
            raise _in_use(folder, name)


def _age(folder: Path, mtime_ns: int) -> float:
    """Seconds since then by the clock of the disk, which is not always that of this machine."""
    probe = folder / f".openrlhf-new-{secrets.token_hex(4)}"
    probe.touch()
    now = probe.stat().st_mtime_ns
    probe.unlink()
    return max((now - mtime_ns) / 1e9, 0.0)


def _in_use(folder: Path, name: str) -> FolderInUseError:
    holder = _read(folder / LOCK)
    who = "another run" if holder is None else str(holder)
    return FolderInUseError(
        f"{name} {str(folder)!r} is in use: {who} writes there. Wait for it, end it, or give another folder"
    )


def _read(path: Path) -> Holder | None:
    """The mark in a lock file; None where it is empty or half-written. Raises ValueError for a file that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    if not text.startswith("{"):
        if text:
            raise ValueError(f"{str(path)!r} is not what a run writes there: move it away")
        return None
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _remove_leftovers(folder: Path) -> None:
    """Half-written files directly in the folder; those in whole folders are the business of their owners."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else socket.gethostname()


def _after_fork() -> None:
    for lock in _held.values():
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
