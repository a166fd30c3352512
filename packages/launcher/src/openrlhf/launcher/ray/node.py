"""What every Ray node of ours is started with, on Slurm and without: environment, folder, memory for objects.

On Slurm a node is `ray start --block` as a child process (`RayNode`), shielded from warning signals, ended by us alone.
Imports no Ray: Ray reads its token when it is imported, and a client of a dead cluster cannot be stopped. So
`python -m openrlhf.launcher.ray.node ADDRESS NODES SECONDS`, which waits until a cluster has its nodes, is a program.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from openrlhf.launcher.ray.leftovers import NODE_VARIABLE
from openrlhf.launcher.ray.scratch import LONGEST_SOCKET_PATH
from openrlhf.launcher.secret_flags import VARIABLE as SECRET_FLAGS

STARTS = 5
"""Attempts to start a node: on a loaded machine Ray gives up after its own time limit."""
EARLY = 300.0
"""An end within so many seconds counts as a failed start."""
STOP_SECONDS = 3.0
"""For an orderly end of Ray's processes; Slurm's KillWait may leave us five seconds in all."""
DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What the user has set wins. Ray gives a node 30 s to start, a worker 60, and lowers its workers' priority by 15: all
three starve a run on a busy CPU."""

SOCKET_SUFFIX = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store_000"
"""What Ray adds to its folder, with the widest process id and the number of a further node on the same machine."""
ON_DEMAND = {"RAY_prestart_worker_first_driver": "0"}
"""On a node of many cores Ray would start a Python per core before anything is asked of it, each with a port."""
ROOM = LONGEST_SOCKET_PATH - len(SOCKET_SUFFIX)
"""Bytes that the path of Ray's temporary folder may have."""


def own_environment(environ: Mapping[str, str], token: str) -> dict[str, str]:
    """What a Ray of our own needs beside the user's environment: its token and our defaults."""
    return {k: environ.get(k, v) for k, v in DEFAULTS.items()} | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def object_store_bytes() -> int:
    """A fifth of the free shared memory, between 200 MiB and 8 GiB: trajectories are small."""
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 1 << 30
    return int(min(max(free // 5, 200 << 20), 8 << 30))


def run_environment(environ: Mapping[str, str], *, token: str, mark: str) -> dict[str, str]:
    """The environment of Ray's processes and of the trainer, without an address: the user's, plus the job's own.

    What is for the trainer alone is left out.
    """
    foreign = ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_TOKEN_PATH", SECRET_FLAGS)
    users = {k: v for k, v in environ.items() if k not in foreign}
    return ON_DEMAND | users | own_environment(environ, token) | {NODE_VARIABLE: mark}


def shield() -> None:
    """Ignore USR1 and USR2 from here on, in started programs too: Slurm signals every process of a step."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def start_shielded(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a program that warning signals do not reach. The node runner has no threads, so the hook is safe."""
    return subprocess.Popen(command, env=environ, preexec_fn=shield)  # noqa: PLW1509


def node_arguments(*, cpus: int, gpus: int, resources: Mapping[str, float] | None = None) -> list[str]:
    """Arguments of `ray start` for every node."""
    return [
        "--block",
        "--disable-usage-stats",
        f"--num-cpus={cpus}",
        f"--num-gpus={gpus}",
        f"--object-store-memory={object_store_bytes()}",
        *([f"--resources={json.dumps(resources)}"] if resources else []),
    ]


def end_children(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """TERM to all, and KILL after so many seconds. Does nothing to a process that has ended."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
        end_children([self._process], STOP_SECONDS)


def wait_for_nodes(address: str, nodes: int, seconds: float) -> int:
    """0 when at least `nodes` nodes are alive, 1 after `seconds`; says on stderr what it sees."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RpcError

    deadline, seen = time.monotonic() + seconds, -1
    while time.monotonic() < deadline:
        try:
            infos = GcsClient(address=address).get_all_node_info(timeout=2)
            alive = sum(info.state == 0 for info in infos.values())
        except RpcError:
            alive = 0
        if alive != seen:
            sys.stderr.write(f"{alive} of {nodes} Ray nodes are up\n")
            seen = alive
        if alive >= nodes:
            return 0
        time.sleep(0.5)
    return 1


if __name__ == "__main__":
    sys.exit(wait_for_nodes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
