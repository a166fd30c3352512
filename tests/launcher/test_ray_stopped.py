from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf.launcher.ray import stopped
from openrlhf.launcher.ray.stopped import children_of, is_stopped, watch

SLEEPS = "import time; print(flush=True); time.sleep(60)"
WATCHED = """
import os, time
from openrlhf.launcher.ray import stopped
stopped.end_when_stopped(os.getpid(), "policy rank 1")
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_that_was_stopped_is_killed_and_the_reason_told(
    sleeper: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert is_stopped(sleeper.pid)
    assert watch(sleeper.pid, "policy rank 1", limit=0.2, every=0.1)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert "policy rank 1 was stopped by a signal" in capfd.readouterr().err


def test_a_pause_is_no_stop(sleeper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on before the limit, and the looks begin anew."""
    looks = iter([True, True, False, True, True, False])

    def look(pid: int) -> bool:
        stopped = next(looks, None)
        if stopped is None:
            sleeper.kill()
        return bool(stopped)

    monkeypatch.setattr("openrlhf.launcher.ray.stopped.is_stopped", look)
    assert not watch(sleeper.pid, "policy rank 1", limit=0.03, every=0.01)


def test_children_are_watched_but_no_watcher(sleeper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "_BESIDE", [])
    watched: list[tuple[int, str]] = []
    with subprocess.Popen([sys.executable, "-c", SLEEPS]) as beside:
        stopped._BESIDE.append(beside)
        monkeypatch.setattr(stopped, "end_when_stopped", lambda pid, name: watched.append((pid, name)))
        stopped.end_when_children_stop("the core of engine 0")
        beside.kill()
    assert (sleeper.pid, "the core of engine 0") in watched
    assert beside.pid not in dict(watched)


def test_children_are_found_while_threads_begin_and_end(sleeper: subprocess.Popen[str]) -> None:
    end = threading.Event()

    def begin_and_end() -> None:
        while not end.is_set():
            brief = threading.Thread(target=lambda: None)
            brief.start()
            brief.join()

    threads = [threading.Thread(target=begin_and_end) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            assert sleeper.pid in children_of(os.getpid())
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_the_watcher_ends_with_its_process() -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = (int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        watcher = os.pidfd_open(child)
        process.kill()
        assert select.select([watcher], [], [], 60)[0]
        os.close(watcher)
