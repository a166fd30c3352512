"""The process that holds math-verify for `library`. Started by it, never imported by it.

Questions are lines of JSON on stdin, answers the lines `1` and `0` on stdout. A forked copy computes; it gets the limit
as CPU time and is killed when the wall clock runs out, or when it takes more memory than it may.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 * 2**30  # of address space, more than the loaded libraries take
PARENT_POLL_SECONDS = 1.0
WARM_UP = [(r"\sum_{k=1}^{3} k", "5"), (r"\int_0^1 x^2 dx", r"\frac{1}{3}"), (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}")]
WALL_FACTOR = 1.3  # of the limit on CPU time: the whole stays below 2 s


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # our parent decides when we end
    parent = os.getppid()
    logging.disable(logging.CRITICAL)
    import math_verify

    for question in WARM_UP:  # so that the copies find grammar and caches filled
        _compute(math_verify, *question)
    _write(b"ready")
    while (question := _read(parent)) is not None:
        _write(b"1" if _limited(math_verify, question) else b"0")


def _write(line: bytes) -> None:
    os.write(1, line + b"\n")


def _read(parent: int) -> dict[str, Any] | None:
    """The next question; None when the parent closed the pipe or is gone."""
    while not select.select([0], [], [], PARENT_POLL_SECONDS)[0]:
        if os.getppid() != parent:
            return None
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else None


def _limited(library: Any, question: dict[str, Any]) -> bool:
    seconds: float = question["seconds"]
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        _child(library, question, seconds, sender)
    os.close(sender)
    try:
        ready = select.select([receiver], [], [], seconds * WALL_FACTOR)[0]
        return bool(ready) and os.read(receiver, 1) == b"1"
    finally:
        os.close(receiver)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _child(library: Any, question: dict[str, Any], seconds: float, sender: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        equal = _compute(library, question["a"], question["b"])
        os.write(sender, b"1" if equal else b"0")
    finally:
        os._exit(0)


def _compute(library: Any, a: str, b: str) -> bool:
    """No time-outs of its own: those are signals that Python code has to come to."""
    first, second = (library.parse(f"${text}$", fallback_mode="no_fallback", parsing_timeout=None) for text in (a, b))
    return bool(first and second and library.verify(first, second, timeout_seconds=None))


if __name__ == "__main__":
    main()
