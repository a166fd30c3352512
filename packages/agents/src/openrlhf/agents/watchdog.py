"""Finds code that blocks an event loop (`time.sleep`, `while True`) and says where it stands: file and line."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

logger = logging.getLogger(__name__)
HEARTBEAT = 0.25  # seconds between two signs of life of the loop
WARN_SECONDS = 5.0  # a loop that is blocked for this long is reported, but goes on
BLOCKED_EXIT_CODE = 70
LIBRARIES = tuple(os.path.abspath(sysconfig.get_paths()[k]) for k in ("stdlib", "platstdlib", "purelib", "platlib"))
OWN = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """Where a loop stands still. seconds: for how long. stack: innermost frame last."""

    file: str
    line: int
    function: str
    seconds: float
    stack: str

    def __str__(self) -> str:
        return (
            f"the agent's event loop has been blocked for {self.seconds:.1f} s by {self.function}() in {self.file}:"
            f"{self.line}; use await (asyncio.sleep, an async client) or asyncio.to_thread there"
        )


class LoopWatchdog:
    """A thread that watches one loop. After `limit` seconds without a sign of life it calls `on_blocked`, once."""

    def __init__(
        self, limit: float, on_blocked: Callable[[Blocked], None], *, warn_after: float = WARN_SECONDS
    ) -> None:
        self._limit = limit
        self._warn_after = min(warn_after, limit)
        self._on_blocked = on_blocked
        self._stop = threading.Event()
        self._beat = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Call from inside the loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._live()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="agent-watchdog")
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _live(self) -> None:
        self._beat = time.monotonic()
        if self._loop is not None and not self._stop.is_set():
            self._loop.call_later(HEARTBEAT, self._live)

    def _watch(self) -> None:
        warned = 0.0
        while not self._stop.wait(HEARTBEAT):
            beat = self._beat
            seconds = time.monotonic() - beat - HEARTBEAT
            if seconds < self._warn_after:
                continue
            if self._loop is None or self._loop.is_closed():
                return
            blocked = self._locate(seconds)
            if blocked is not None and seconds >= self._limit:
                logger.error("%s\n%s", blocked, blocked.stack)
                self._on_blocked(blocked)
                return
            if blocked is not None and warned != beat:
                warned = beat
                logger.warning("%s", blocked)

    def _locate(self, seconds: float) -> Blocked | None:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return None
        author = _author_frame(frame) or frame
        return Blocked(
            file=author.f_code.co_filename,
            line=author.f_lineno,
            function=author.f_code.co_name,
            seconds=seconds,
            stack="".join(traceback.format_stack(frame)),
        )


def _author_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither of a library nor of this package."""
    while frame is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        if not file.startswith(LIBRARIES) and not file.startswith(OWN):
            return frame
        frame = frame.f_back
    return None


def exit_process(blocked: Blocked) -> None:
    """For a worker that its owner replaces: a blocked loop cannot be ended in any other way."""
    logger.error("%s: this process ends and is replaced", blocked)
    logging.shutdown()
    os._exit(BLOCKED_EXIT_CODE)
