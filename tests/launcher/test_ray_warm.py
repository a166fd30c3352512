"""Workers as forks: what they get, what they cost the one they come from, and what happens when either side ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from openrlhf.launcher.ray import warm
from openrlhf.launcher.ray.cluster import Cluster
from openrlhf.launcher.ray.warm import VARIABLE, WarmStart, runtime_env

WORKER = """
import os, sys, threading, time
loaded = "xml.dom.minidom" in sys.modules
import random
print(loaded, sys.argv[1:], os.environ.get("GREETING"), os.getcwd(), sys.path[0], os.getppid(), random.random())
print(__name__, threading.active_count(), os.environ.get("TORCH_LOGS"), os.environ.get("SET"), file=sys.stderr)
print("alone" if os.getpgrp() == os.getpid() else "Ray ends its group, the others with it", file=sys.stderr)
sys.stdout.flush()
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


class Stage:
    """A process with an import, and programs that its forks are to run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sets_variables.py").write_text(
            "import os\nos.environ['TORCH_LOGS'] = os.environ['SET'] = 'imported'\n"
        )
        self.environ = {**os.environ, "GREETING": "theirs", "PYTHONPATH": str(folder)}
        self.program = folder / "worker.py"
        self.program.write_text(WORKER)
        self.workers: list[subprocess.Popen[str]] = []
        self.start = WarmStart(folder, self.environ, ["no.such.module", "sets_variables", "xml.dom.minidom"])

    @property
    def pid(self) -> int:
        return self.start._process.pid

    def worker(self, seconds: float, **environ: str) -> subprocess.Popen[str]:
        """As Ray starts one: a shell command, whose Python is the stand-in."""
        python = runtime_env({VARIABLE: self.start.path})["py_executable"]
        worker = subprocess.Popen(
            ["bash", "-c", f"exec {python} {shlex.quote(str(self.program))} {seconds}"],
            env={**self.environ, **environ},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        self.start.close()
        for worker in self.workers:
            worker.kill()
            worker.communicate()

    def forks(self) -> list[int]:
        return [pid for pid in pids() if parent(pid) == self.pid]

    def said(self) -> str:
        return (self.folder / "warm.log").read_text()


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def parent(pid: int) -> int:
    try:
        state, ppid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return -1
    return -1 if state == "Z" else int(ppid)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def test_a_fork_has_the_imports_and_all_that_ray_gave_its_stand_in(stage: Stage) -> None:
    first, second = stage.worker(0, GREETING="hello"), stage.worker(0, OMP_NUM_THREADS="3")
    out, err = first.communicate(timeout=60)
    where = [str(stage.folder), str(stage.folder), str(stage.pid)]
    assert out.split()[:-1] == ["True", "['0']", "hello", *where]
    assert err.split() == ["__main__", "1", "imported", "imported", "alone"]
    assert first.returncode == 7
    other = second.communicate(timeout=60)[0].split()
    assert other[:-1] == ["True", "['0']", "theirs", *where]
    assert other[-1] != out.split()[-1], "the forks' random numbers are the same"
    assert "no.such.module is not shared by workers" in stage.said()


@pytest.mark.parametrize("variable", ["PYTHONHASHSEED", "TORCH_LOGS", "MKL_CBWR"])
def test_a_worker_that_libraries_would_be_loaded_otherwise_for_is_no_fork(stage: Stage, variable: str) -> None:
    worker = stage.worker(0, **{variable: "1"})
    out = worker.communicate(timeout=60)[0].split()
    assert (out[0], out[5] == str(stage.pid), worker.returncode) == ("False", False, 7)
    assert variable in stage.said()


def test_stand_in_and_worker_end_together(stage: Stage) -> None:
    worker = stage.worker(600)
    until(stage.forks)
    worker.kill()
    until(lambda: not stage.forks())
    worker.communicate()
    worker = stage.worker(600)
    until(stage.forks)
    os.kill(stage.forks()[0], signal.SIGKILL)
    worker.communicate(timeout=60)
    assert worker.returncode == 256 - signal.SIGKILL


def test_workers_start_without_it_too_and_outlive_it(stage: Stage) -> None:
    before = stage.worker(1)
    until(stage.forks)
    (fork,) = stage.forks()
    stage.start.close()
    assert parent(fork) > 0
    after = stage.worker(0)
    assert (after.communicate(timeout=60)[0].split()[0], after.returncode) == ("False", 7)
    before.communicate(timeout=60)


def test_it_ends_with_the_driver(stage: Stage) -> None:
    assert stage.start._process.stdin is not None
    stage.start._process.stdin.close()
    assert stage.start._process.wait(60) == 0


def test_only_a_ray_that_has_it_starts_workers_so(stage: Stage) -> None:
    def environment(made: WarmStart | None) -> Mapping[str, str]:
        return Cluster(started=True, run_id="r", warm=made).worker_environment()

    assert runtime_env(environment(None)) == {"env_vars": environment(None)}
    made = runtime_env(environment(stage.start))
    assert made["py_executable"] == shlex.join([sys.executable, "-I", "-S", warm.__file__, stage.start.path])
