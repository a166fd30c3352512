"""CPU time as a ratio to a bare interpreter of the same run, so that a slow machine is no failure (W01, W03)."""

from __future__ import annotations

import resource
import subprocess
import sys


def bare_interpreters(code: str, *arguments: str) -> float:
    """How many times the CPU time of `python -c pass` the code needs; of each the least of three runs."""
    return min(_cpu(code, *arguments) for _ in range(3)) / min(_cpu("pass") for _ in range(3))


def _cpu(code: str, *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, capture_output=True, timeout=200, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
