"""The process that computes for `limited`. Started by it, never imported by it. First argument: a key of `KINDS`.

Questions are lines of JSON on stdin, answers the lines `1` and `0` on stdout. A forked copy computes; it gets the limit
as CPU time and is killed when the wall clock runs out, or when it takes more memory than it may.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

MEMORY_BYTES = 2 * 2**30  # of address space, more than the loaded libraries take
PARENT_POLL_SECONDS = 1.0
WARM_UP = [(r"\sum_{k=1}^{3} k", "5"), (r"\int_0^1 x^2 dx", r"\frac{1}{3}"), (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}")]
WALL_FACTOR = 1.2  # of the limit on CPU time: the whole stays below 2 s


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # our parent decides when we end
    parent = os.getppid()
    logging.disable(logging.CRITICAL)
    compute = KINDS[sys.argv[1]]()
    _write(b"ready")
    while (asked := _read(parent)) is not None:
        _write(_limited(partial(compute, **asked["question"]), asked["seconds"]))


def _write(line: bytes) -> None:
    os.write(1, line + b"\n")


def _read(parent: int) -> dict[str, Any] | None:
    """The next question; None when the parent closed the pipe or is gone."""
    while not select.select([0], [], [], PARENT_POLL_SECONDS)[0]:
        if os.getppid() != parent:
            return None
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else None


def _limited(compute: Callable[[], bool], seconds: float) -> bytes:
    """`1` or `0`, or `-` where there is no answer within the limit."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        _child(compute, seconds, sender)
    os.close(sender)
    try:
        ready = select.select([receiver], [], [], seconds * WALL_FACTOR)[0]
        return (os.read(receiver, 1) if ready else b"") or b"-"
    finally:
        os.close(receiver)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _child(compute: Callable[[], bool], seconds: float, sender: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        os.write(sender, b"1" if compute() else b"0")
    finally:
        os._exit(0)


def _math() -> Callable[..., bool]:
    """math-verify, without time-outs of its own: those are signals that Python code has to come to."""
    library = importlib.import_module("math_verify")

    def equal(a: str, b: str) -> bool:
        first, second = (
            library.parse(f"${text}$", fallback_mode="no_fallback", parsing_timeout=None) for text in (a, b)
        )
        return bool(first and second and library.verify(first, second, timeout_seconds=None))

    for question in WARM_UP:  # so that the copies find grammar and caches filled
        equal(*question)
    return equal


def _pattern() -> Callable[..., bool]:
    def found(pattern: str, text: str, whole: bool) -> bool:
        expression = re.compile(pattern, re.DOTALL)
        return bool(expression.fullmatch(text) if whole else expression.search(text))

    return found


KINDS = {"math": _math, "pattern": _pattern}


if __name__ == "__main__":
    main()
