"""Running rows in a process beside this one, each with a bound: a hang or a crash is a failed row, not the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from openrlhf.launcher.selfcheck.table import Row

Result = Literal["ok", "failed", "skipped"]

SHOWN_LINES = 40
START_LOG = "worker.log"
POLL_S = 0.05
END_S = 10.0
"""For a worker to leave once its last row is over."""
LONGEST_FOLDER = 40
"""Longer temporary folders leave no room for the names of vLLM's sockets."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a row. detail: what was seen, or why not. log: the last lines that a failed one wrote."""

    name: str
    result: Result
    detail: str
    fix: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    time: str = ""
    log: str = ""


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def skipped(row: Row, why: str) -> Report:
    """The report of a row that can't run here."""
    return Report(name=row.name, result="skipped", detail=why, time=now())


def run(row: Row) -> Report:
    """One row alone, within its bound."""
    (report,) = run_all([row], lambda row: row.bound_s)
    return report


def run_all(rows: Iterable[Row], bound: Callable[[Row], float]) -> Generator[Report, None, None]:
    """Run rows one after the other; neighbours that share a process stay in it as long as it lives.

    bound: asked right before each row for the seconds that it may take. What a row leaves behind is ended and removed
    with its process.
    """
    worker: Worker | None = None
    try:
        for row in rows:
            if worker is not None and not (worker.alive and row.shares and row.shares == worker.shares):
                worker.close()
                worker = None
            if worker is None:
                worker = Worker(row.shares)
            yield worker.run(row, bound(row))
    finally:
        if worker is not None:
            worker.close()


class Worker:
    """The process in which rows run, and its folder."""

    def __init__(self, shares: str) -> None:
        self.shares = shares
        self.alive = True
        parent = tempfile.gettempdir()
        self._folder = Path(
            tempfile.mkdtemp(prefix="selfcheck-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp")
        )
        with (self._folder / START_LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "openrlhf.launcher.selfcheck.worker", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self._folder)},
                start_new_session=True,
            )

    def run(self, row: Row, bound_s: float) -> Report:
        """Run one row and wait for it, at most `bound_s` seconds; one that does not end well ends the process."""
        began = time.monotonic()
        said = self._said(row, bound_s)
        ok = bool(said["ok"])
        log = self._folder / f"{row.name}.log"
        log = log if log.exists() else self._folder / START_LOG
        written = "" if ok else log.read_text(encoding="utf-8", errors="replace")
        return Report(
            name=row.name,
            result="ok" if ok else "failed",
            detail=said["detail"],
            fix="" if ok else row.fix,
            numbers=said.get("numbers", {}),
            seconds=round(time.monotonic() - began, 1),
            time=now(),
            log="\n".join(written.splitlines()[-SHOWN_LINES:]),
        )

    def _said(self, row: Row, bound_s: float) -> dict[str, Any]:
        result = self._folder / f"{row.name}.json"
        job = {"name": row.name, "function": row.function, "bound_s": bound_s}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already: seen below
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        end = time.monotonic() + bound_s
        while not result.is_file():
            status = self._process.poll()
            late = time.monotonic() > end
            if late or status is not None:
                self._kill()
            if late:
                return {"ok": False, "detail": f"it did not end within {bound_s:g} s"}
            if status is not None and not result.is_file():
                return {"ok": False, "detail": f"its process {_how(status)} without a result"}
            time.sleep(POLL_S)
        return json.loads(result.read_text(encoding="utf-8"))

    def close(self) -> None:
        """Let the process leave, end what is left of it and remove its folder."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        """End the session: the process, if that still runs, and every child it left."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_S)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
