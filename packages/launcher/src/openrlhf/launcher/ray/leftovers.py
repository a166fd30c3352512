"""What a run that started its own Ray leaves behind, ended and removed: at its end, and when the driver is killed.

Standard library only: `python -I leftovers.py RUN_ID FOLDER` is the guard, a process that outlives the driver.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN_ID_VARIABLE = "OPENRLHF_RUN_ID"
"""Set in the environment of every process of a run, so that the end of the run can find what is left."""

NODE_VARIABLE = "OPENRLHF_NODE_RUN"
"""The same for all that one node of a Slurm job starts: a run on several nodes of one machine ends each by itself."""

GUARD_ENDS_S = 20.0
"""Longest wait for a guard that was told to end."""

SWEEPS = 5
"""Rounds of a guard: a process that was just being started carries the run's id only a moment later."""


class Guard:
    """A small process beside the driver that ends the run's processes and removes its folder once the driver is gone.

    SIGKILL leaves the driver no time to do it, and parts of Ray notice only after a minute, or never. The guard waits
    for the end of a pipe that only the driver holds, in a session of its own, so no signal to the driver's group
    reaches it.
    """

    def __init__(self, run_id: str, folder: Path) -> None:
        own = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
        command = [sys.executable, "-I", "-S", __file__, run_id, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=own, start_new_session=True)

    def close(self) -> None:
        """Let it clean up what is left, which after an orderly end is nothing; safe to call twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None
            try:
                self._process.wait(GUARD_ENDS_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def sweep(mark: str, folder: Path | None = None, *, variable: str = RUN_ID_VARIABLE, grace: float = 5.0) -> list[int]:
    """TERM, then KILL after `grace` seconds, for every process of a run that is not this process or its parent.

    mark: what `variable` holds in the run's processes. folder: the run's own temporary folder. Returns their pids.
    """
    mine = {os.getpid(), os.getppid()}
    left = found = [pid for pid in processes_of_run(mark, folder, variable) if pid not in mine]
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            _signal(pid, sig)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(is_running(pid) for pid in left):
            time.sleep(0.05)
        again = processes_of_run(mark, folder, variable)  # what was being started meanwhile
        left = [pid for pid in again if pid not in mine and is_running(pid)]
        found = sorted({*found, *left})
        if not left:
            break
    return found


def processes_of_run(mark: str, folder: Path | None = None, variable: str = RUN_ID_VARIABLE) -> list[int]:
    """Pids on this machine whose environment holds the run's mark, or that have a file open in the run's own folder.

    Programs that change their title, as Ray's agents do, write it over what /proc shows of their environment; their
    logs still lie in the folder.
    """
    marker, inside = f"{variable}={mark}".encode(), f"{folder}/"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                marked = marker in (entry / "environ").read_bytes().split(b"\0")
                if marked or (folder is not None and _has_open(entry / "fd", inside)):
                    found.append(int(entry.name))
            except OSError:  # gone, or another user's
                continue
    return found


def _has_open(descriptors: Path, inside: str) -> bool:
    for descriptor in descriptors.iterdir():
        try:
            if os.readlink(descriptor).startswith(inside):
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def _signal(pid: int, sig: signal.Signals) -> None:
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


def _guard(run_id: str, folder: Path) -> None:
    sys.stdin.buffer.read()
    for _ in range(SWEEPS):
        if not sweep(run_id, folder):
            break
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(sys.argv[1], Path(sys.argv[2]))
