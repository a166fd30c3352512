"""Runs a program against tests in a process of its own, with limits on time, CPU, memory, files and output.

The limits stop accidents and loops; they are no sandbox against a hostile program: run untrusted code in a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

FENCED = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*\n(.*?)```", re.DOTALL)
OUTPUT_BYTES = 64 * 1024  # kept of a program's output

# Runs in the child, before the program: POSIX limits where the system has them, and an end together with the parent.
BOOTSTRAP = """
import json, sys
limits = json.loads(sys.argv[1])
try:
    import resource
    def limit(kind, value):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    limit(resource.RLIMIT_CPU, limits["cpu"])
    limit(resource.RLIMIT_AS, limits["memory"])
    limit(resource.RLIMIT_FSIZE, limits["file"])
    limit(resource.RLIMIT_CORE, 0)
except ImportError:
    pass
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
path = sys.argv[2]
sys.argv = [path]
with open(path, encoding="utf-8") as file:
    source = file.read()
exec(compile(source, path, "exec"), {"__name__": "__main__", "__file__": path})
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeLimits:
    """seconds: wall clock and CPU of one run. memory_mb: address space. file_mb: largest file it may write."""

    seconds: float = 5.0
    memory_mb: int = 512
    file_mb: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeResult:
    """One run. exit_code None: it was killed at the time limit."""

    exit_code: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class IOTest:
    """The program gets `input` on stdin and has to print `output` (compared without trailing blanks)."""

    input: str
    output: str


def extract_code(response: str) -> str:
    """The last fenced block of a response, or all of it where there is none."""
    blocks = FENCED.findall(response)
    return blocks[-1] if blocks else response


def run_code(source: str, stdin: str = "", limits: CodeLimits | None = None) -> CodeResult:
    """Runs a Python program in an empty folder. Never raises for what the program does."""
    limits = limits or CodeLimits()
    with tempfile.TemporaryDirectory(prefix="code-") as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(source)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", BOOTSTRAP, _limit_json(limits), path],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", ""), "PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
            code = _communicate(process, stdin.encode("utf-8", "surrogatepass"), limits.seconds)
            return CodeResult(exit_code=code, stdout=_read(out), stderr=_read(err))


def _limit_json(limits: CodeLimits) -> str:
    megabyte = 2**20
    cpu = max(1, int(limits.seconds + 0.999))
    return json.dumps({"cpu": cpu, "memory": limits.memory_mb * megabyte, "file": limits.file_mb * megabyte})


def _communicate(process: subprocess.Popen, stdin: bytes, seconds: float) -> int | None:
    """The exit code; everything that the program started is ended with it."""
    try:
        process.communicate(stdin, timeout=seconds)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _read(file) -> str:
    file.seek(0)
    return file.read(OUTPUT_BYTES).decode("utf-8", "replace")


def grade_code(
    response: str, tests: Sequence[IOTest] | str, limits: CodeLimits | None = None
) -> tuple[float, list[CodeResult]]:
    """The share of tests that the code in a response passes, and the runs.

    tests: input/output pairs, one run each; or Python source with asserts, appended to the program in one run.
    """
    source = extract_code(response)
    if isinstance(tests, str):
        result = run_code(f"{source}\n\n{tests}\n", limits=limits)
        return float(result.ok), [result]
    if not tests:
        raise ValueError("grade_code: no tests given")
    results = [run_code(source, test.input, limits) for test in tests]
    passed = [r.ok and _lines(r.stdout) == _lines(t.output) for r, t in zip(results, tests, strict=True)]
    return sum(passed) / len(tests), results


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def grade_code_async(
    response: str, tests: Sequence[IOTest] | str, limits: CodeLimits | None = None
) -> tuple[float, list[CodeResult]]:
    """`grade_code` for the step of an agent: the event loop goes on meanwhile."""
    return await asyncio.to_thread(grade_code, response, tests, limits)
