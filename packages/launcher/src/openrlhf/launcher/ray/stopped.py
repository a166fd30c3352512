"""Ends a process of a run that a signal has stopped: its connections stay open, so nobody else sees it stand still.

Standard library only: `python -I -S stopped.py PID NAME` is a small process beside the other and ends with it. Its own
looks are the clock, so a machine that was suspended as a whole ends nobody.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

STOPPED_S = 30.0
"""How long it may be stopped (SIGSTOP, or a terminal's) before it is killed. A debugger's stop is none."""
LOOK_S = 2.0
NOTICE_S = 1.0
"""Between the reason and the kill: what its end brings about must not be told first."""

_BESIDE: list[subprocess.Popen[bytes]] = []
"""Those of this process: Python warns of one that nobody holds."""


def end_when_stopped(pid: int, name: str) -> None:
    """Have a process killed once it was stopped for `STOPPED_S`. name: what messages call it, as "policy rank 0"."""
    command = [sys.executable, "-I", "-S", __file__, str(pid), name]
    _BESIDE.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))


def end_when_children_stop(name: str) -> None:
    """The same for every process that this one has started."""
    for pid in children_of(os.getpid()) - {process.pid for process in _BESIDE}:
        end_when_stopped(pid, name)


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal. Raises OSError where it is gone."""
    return _state_and_parent(pid)[0] == "T"


def children_of(pid: int) -> set[int]:
    """Processes that it has started, from all of its threads: `/proc/PID/task/*/children` loses those of a thread that
    ends meanwhile."""
    children = set()
    for process in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with suppress(OSError):  # it has ended
            if _state_and_parent(process)[1] == pid:
                children.add(process)
    return children


def _state_and_parent(pid: int) -> tuple[str, int]:
    state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    return state, int(parent)


def watch(pid: int, name: str, *, limit: float = STOPPED_S, every: float = LOOK_S) -> bool:
    """Until the process ends, or was seen stopped for `limit` seconds and is killed. Returns whether it was."""
    stopped = 0.0
    try:
        descriptor = os.pidfd_open(pid)
        while not select.select([descriptor], [], [], every)[0]:
            stopped = stopped + every if is_stopped(pid) else 0.0
            if stopped >= limit:
                sys.stderr.write(f"{name} was stopped by a signal for {limit:.0f} s, longer than any pause: killed\n")
                sys.stderr.flush()
                time.sleep(NOTICE_S)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
    except OSError:  # it has ended
        pass
    return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
