"""`ray start --block` as a child process: one Ray node of a run, shielded from warning signals, ended by us alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from openrlhf.launcher.secret_flags import VARIABLE as SECRET_FLAGS
from openrlhf.launcher.slurm.folders import object_store_bytes
from openrlhf.launcher.slurm.leftovers import MARK
from openrlhf.launcher.slurm.ports import PortBlock

STARTS = 5
"""Attempts to start a node: on a loaded machine Ray gives up after its own time limit."""
EARLY = 300.0
"""An end within so many seconds counts as a failed start."""
STOP_SECONDS = 3.0
"""For an orderly end of Ray's processes; Slurm's KillWait may leave us five seconds in all."""
DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_niceness": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What the user has set wins."""


def run_environment(environ: Mapping[str, str], *, token: str, mark: str) -> dict[str, str]:
    """The environment of Ray's processes and of the trainer, without an address: the user's, plus the job's own.

    What is for the trainer alone is left out.
    """
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, MARK: mark}
    foreign = ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_TOKEN_PATH", SECRET_FLAGS)
    return DEFAULTS | {k: v for k, v in environ.items() if k not in foreign} | own


def shield() -> None:
    """Ignore USR1 and USR2 from here on, in started programs too: Slurm signals every process of a step."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def start_shielded(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program that warning signals do not reach. The node runner has no threads, so the hook is safe."""
    return subprocess.Popen(command, env=environ, preexec_fn=shield)  # noqa: PLW1509


def common_arguments(block: PortBlock, *, cpus: int, gpus: int) -> list[str]:
    """Arguments of `ray start` for every node."""
    return [
        "--block",
        "--disable-usage-stats",
        f"--num-cpus={cpus}",
        f"--num-gpus={gpus}",
        f"--object-store-memory={object_store_bytes()}",
        *block.node_arguments(),
    ]


class RayNode:
    """A Ray node that is started again if it fails at once. `poll` tells how it stands."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], *, starts: int = STARTS) -> None:
        self._command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
        self._environ = dict(environ)
        self._left = starts
        self._ready = False
        self._start()

    def _start(self) -> None:
        self._left -= 1
        self._since = time.monotonic()
        self._process = start_shielded(self._command, self._environ)

    def poll(self) -> int | None:
        """None while it runs or is being started again, else its exit status."""
        code = self._process.poll()
        if code is not None and self._left > 0 and time.monotonic() - self._since < EARLY and not self._ready:
            sys.stderr.write(f"ray start ended with {code}: trying again\n")
            self._start()
            return None
        return code

    def is_up(self) -> None:
        """From now on an end is an end."""
        self._ready = True

    def stop(self) -> None:
        """TERM, then KILL. Bounded by STOP_SECONDS."""
        self._left = 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def default_gpus() -> int:
    """GPUs of this machine, for sites where Slurm does not know them."""
    from openrlhf.launcher.machine import detect_machine

    return detect_machine(os.environ).gpus
