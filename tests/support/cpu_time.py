"""CPU time as a ratio to a small program of the same run, so that a slow machine is no failure (W01, W03)."""

from __future__ import annotations

import resource
import subprocess
import sys

SMALL_PROGRAM = "import argparse, asyncio, dataclasses, email.message, inspect, json"
"""An interpreter with what most programs import: `pass` alone takes about as long as the clock's step."""


def small_programs(code: str, *arguments: str) -> float:
    """How many times the CPU time of `SMALL_PROGRAM` the code needs; of each the least of three runs."""
    return min(_cpu(code, *arguments) for _ in range(3)) / min(_cpu(SMALL_PROGRAM) for _ in range(3))


def _cpu(code: str, *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, capture_output=True, timeout=200, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
