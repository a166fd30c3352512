"""Rows that end in every way a row can end; they run in processes of their own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome


def fine(folder: Path) -> Outcome:
    (folder / "left behind").write_text("x")
    print("says much")
    return Outcome(detail=f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", numbers={"tokens_per_s": 2.5})


def pid(folder: Path) -> Outcome:
    print("pid")
    return Outcome(detail=str(os.getpid()))


def finds(folder: Path) -> Outcome:
    print("says much")
    raise CheckError("the two differ by 3")


def raises(folder: Path) -> Outcome:
    raise KeyError("down_proj")


def leaves(folder: Path) -> Outcome:
    os._exit(3)


def crashes(folder: Path) -> Outcome:
    ctypes.string_at(0)
    raise AssertionError("reading address 0 ends a process")


def hangs(folder: Path) -> Outcome:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["SELFCHECK_TEST_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    raise AssertionError("ended by then")
