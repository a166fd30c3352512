"""Only the processes of one's own run are ended, in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from openrlhf.launcher.ray.leftovers import NODE_VARIABLE, is_running, processes_of_run, sweep

Start = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code with a mark, and waits for its first line; ends what is left."""
    started: list[subprocess.Popen[str]] = []

    def start(mark: str, code: str) -> subprocess.Popen[str]:
        command = ["raylet", "-c", f"import os, signal, time\n{code}\nprint('up', flush=True)\ntime.sleep(600)"]
        environ = os.environ | {NODE_VARIABLE: mark}
        process = subprocess.Popen(command, executable=sys.executable, env=environ, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_another_run_s_raylet_lives_b106(start: Start) -> None:
    mine, other, longer = start("7.0.0", ""), start("8.0.0", ""), start("7.0.01", "")
    assert sweep("7.0.0", variable=NODE_VARIABLE, grace=5) == [mine.pid]
    assert mine.wait(5) == -signal.SIGTERM
    assert [other.poll(), longer.poll()] == [None, None]


def test_what_ignores_term_is_killed(start: Start) -> None:
    process = start("9.0.0", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert sweep("9.0.0", variable=NODE_VARIABLE, grace=0.5) == [process.pid]
    assert process.wait(60) == -signal.SIGKILL


def test_zombies_are_not_waited_for_b106(start: Start) -> None:
    parent = start("10.0.0", "os.environ['x'] = '1'\nchild = os.fork()\nif child == 0: os._exit(0)\ntime.sleep(0.3)")
    (child,) = [int(pid) for pid in _children(parent.pid)]
    assert not is_running(child)
    assert sweep("10.0.0", variable=NODE_VARIABLE, grace=1000) == [
        parent.pid
    ]  # its pytest time-out ends a wait for the zombie
    assert processes_of_run("10.0.0", variable=NODE_VARIABLE) == []


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
