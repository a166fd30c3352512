"""Tries an author's file in a process of its own, before anything starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

SHOWN = 8000  # characters of what the process wrote last


def run_check(arguments: Sequence[str], content: bytes, seconds: float) -> tuple[int, str]:
    """Runs Python with these arguments and `content` on stdin. Returns its exit code and the end of its output.

    What it started, such as servers and process pools, ends with it. Raises TimeoutError after `seconds`.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:  # a pipe would wait for grandchildren
        given.write(content)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],  # a folder named openrlhf in the working directory must not hide ours
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")[-SHOWN:].strip()


def leave(message: str = "") -> None:
    """Ends a checking process at once, whatever threads the file started: exit code 0, or 1 with this message."""
    sys.stderr.write(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if message else 0)
