"""Questions to libraries that cannot be interrupted, in a process of its own and with a limit on each.

Neither sympy nor a regular expression ends for a signal outside the main thread. So a helper process loads the library
once and answers one question after the other in a copy of itself, which is killed at the limit; the next question finds
the helper ready. It is started at the first question and ends with us.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

START_SECONDS = 120.0  # importing sympy on a busy machine
GRACE_SECONDS = 30.0  # for the helper's own clock; then the helper itself is ended


class Helper:
    """The helper process of this process for one kind of question (`limited_child.KINDS`); safe in several threads."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, question: dict[str, Any], seconds: float) -> bool | None:
        """The answer; None where it was not there within `seconds` of wall clock and of CPU."""
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps({"seconds": seconds, "question": question}).encode() + b"\n")
                process.stdin.flush()
            except OSError:
                self._end()
                return None
            answer = self._line(seconds + GRACE_SECONDS)
            if answer is None:
                self._end()
            return {b"1": True, b"0": False}.get(answer or b"")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a fork of ours has no helper
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-P", "-m", "openrlhf.agents.graders.limited_child", self._kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self._end)
        if self._line(START_SECONDS) != b"ready":
            self._end()
            raise RuntimeError(f"the process that computes {self._kind} was not ready after {START_SECONDS:g} s")
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
