"""Asks math-verify (extra `[math]`) about sums, products, integrals, limits: in a process of its own, with a limit.

Sympy cannot be interrupted from a thread, and not by a signal where it is asked outside the main thread. So a helper
process loads it once and answers one question after the other in a copy of itself, which is killed at the limit: that
answer is wrong, the next one finds the helper ready. It is started at the first such question and ends with us.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from functools import lru_cache
from importlib.util import find_spec

SECONDS = 1.5  # for one question, of wall clock and of CPU
START_SECONDS = 120.0  # importing sympy on a busy machine
GRACE_SECONDS = 30.0  # for the helper's own clock; then the helper itself is ended
LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


@lru_cache(maxsize=4096)
def library_equal(a: str, b: str) -> bool:
    """Whether math-verify finds two LaTeX expressions equal within the limit; their order does not matter."""
    letters = {letter for letter in LETTER.findall(f"{a} {b}") if len(letter) == 1}
    if len({letter.lower() for letter in letters}) < len(letters):
        return False  # it reads all letters as lower case
    first, second = sorted((a, b))
    return _helper.ask(first, second)


class Helper:
    """The helper process of this process; safe to be asked from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, a: str, b: str) -> bool:
        with self._lock:
            process = self._running()
            question = json.dumps({"a": a, "b": b, "seconds": SECONDS}).encode() + b"\n"
            try:
                assert process.stdin is not None
                process.stdin.write(question)
                process.stdin.flush()
            except OSError:
                self._end()
                return False
            answer = self._line(SECONDS + GRACE_SECONDS)
            if answer is None:
                self._end()
            return answer == b"1"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a fork of ours has no helper
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return self._process
        if find_spec("math_verify") is None:
            raise ImportError("math-verify is not installed: pip install 'openrlhf-agents[math]'")
        command = [sys.executable, "-P", "-m", "openrlhf.agents.graders.answer.library_child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self._end)
        if self._line(START_SECONDS) != b"ready":
            self._end()
            raise RuntimeError(f"the process that loads math-verify was not ready after {START_SECONDS:g} s")
        return self._process

    def _line(self, seconds: float) -> bytes | None:
        """The next line of the helper; None where it ended or took too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        until = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            ready = select.select([source], [], [], max(0.0, until - time.monotonic()))[0]
            part = os.read(source, 64) if ready else b""
            if not part:
                return None
            line += part
        return line.strip()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.kill()
        process.wait()


_helper = Helper()
