"""The guard ends what a killed driver leaves and removes its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from openrlhf.launcher.ray import leftovers
from openrlhf.launcher.ray.leftovers import RUN_ID_VARIABLE, Guard, processes_of_run, sweep

DRIVER = """
import os, signal, subprocess, sys
from pathlib import Path
from openrlhf.launcher.ray.leftovers import RUN_ID_VARIABLE, Guard
run_id, folder = sys.argv[1:]
guard = Guard(run_id, Path(folder))
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(1e4)"
env = {**os.environ, RUN_ID_VARIABLE: run_id}
for code in (stubborn, "import time; print('up', flush=True); time.sleep(1e4)"):
    child = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
unmarked = [sys.executable, "-c", "import time; time.sleep(1e4)"]
subprocess.Popen(unmarked, start_new_session=True, stdout=open(folder + "/agent.log", "w"))  # like Ray's agents
print("up", flush=True)
signal.pause()
"""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in 120 s"
        time.sleep(0.05)


def test_l16_all_is_gone_after_the_driver_was_killed(tmp_path: Path) -> None:
    run_id, folder = os.urandom(8).hex(), tmp_path / "ours"
    folder.mkdir()
    (folder / "socket").touch()
    command = [sys.executable, "-c", DRIVER, run_id, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"up\n"
        assert len(processes_of_run(run_id)) == 2
        assert len(processes_of_run(run_id, folder)) == 3
        os.killpg(driver.pid, signal.SIGKILL)
    until(lambda: not folder.exists(), "removed folder")
    assert processes_of_run(run_id, folder) == []


def test_l16_a_guard_that_is_told_to_end_is_over_at_once(tmp_path: Path) -> None:
    run_id, folder = os.urandom(8).hex(), tmp_path / "ours"
    folder.mkdir()
    guard = Guard(run_id, folder)
    guard.close()
    assert guard._process.returncode == 0
    guard.close()
    assert not folder.exists()


def test_l16_the_guard_needs_the_standard_library_only(tmp_path: Path) -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*{n.partition('.')[0] for n in sys.modules})"
    command = [sys.executable, "-I", "-S", "-c", code, leftovers.__file__]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) - set(sys.stdlib_module_names) <= {"__main__", "_distutils_hack"}


def test_sweep_leaves_this_process_alone() -> None:
    run_id = os.urandom(8).hex()
    env = {**os.environ, RUN_ID_VARIABLE: run_id}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e4)"], env=env)
    until(lambda: processes_of_run(run_id) == [child.pid], "child")
    assert sweep(run_id) == [child.pid]
    assert child.wait(60) == -signal.SIGTERM
