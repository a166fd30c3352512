"""End every process of a run on this machine, and no other: those that carry the run's mark in their environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

MARK = "OPENRLHF_NODE_RUN"
"""Set by the node runner for Ray and the trainer; all of their children inherit it."""


def end_marked(mark: str, *, grace: float = 3.0) -> list[int]:
    """TERM, then KILL after `grace` seconds. Spares this process and its parent. Returns the pids that were left."""
    left = marked(mark)
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            send(pid, sig)
        deadline = time.monotonic() + grace
        while (alive := [pid for pid in marked(mark) if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not alive:
            break
        left = sorted({*left, *alive})
    return left


def marked(mark: str) -> list[int]:
    """Pids whose environment holds MARK=mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone, or another user's
                continue
    return found


def send(pid: int, sig: signal.Signals) -> None:
    """Send a signal; a process that is gone is no error."""
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
