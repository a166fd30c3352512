"""Processes that are left behind: found by who their parent becomes, which they cannot change."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SECONDS = 20.0


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """What is started within, and loses its parent, becomes our child, and none is there when this ends."""
    adopt = ctypes.CDLL(None).prctl
    before = children()
    adopt(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        adopt(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    deadline = time.monotonic() + SECONDS
    while (left := children() - before) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


def children() -> set[int]:
    """Processes whose parent is this one."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()}
    return found
