"""Running a row in a process of its own, with a bound: a hang or a crash is a failed row, not the end of the check."""

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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from openrlhf.launcher.selfcheck.table import Row

Result = Literal["ok", "failed", "skipped"]

SHOWN_LINES = 40
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
    """Run one row and wait for it, at most `row.bound_s` seconds. What it leaves behind is ended and removed."""
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="selfcheck-", dir=parent if len(parent) <= LONGEST_FOLDER else "/tmp"))
    began = time.monotonic()
    try:
        said, log = _call(row, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ok = bool(said["ok"])
    return Report(
        name=row.name,
        result="ok" if ok else "failed",
        detail=said["detail"],
        fix="" if ok else row.fix,
        numbers=said.get("numbers", {}),
        seconds=round(time.monotonic() - began, 1),
        time=now(),
        log="" if ok else "\n".join(log.splitlines()[-SHOWN_LINES:]),
    )


def _call(row: Row, folder: Path) -> tuple[dict[str, Any], str]:
    result, log, work = folder / "result.json", folder / "log", folder / "work"
    work.mkdir()
    command = [sys.executable, "-m", "openrlhf.launcher.selfcheck.worker"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, row.function, str(work), str(result), str(row.bound_s)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(row.bound_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    written = log.read_text(encoding="utf-8", errors="replace")
    if status is None:
        return {"ok": False, "detail": f"it did not end within {row.bound_s:g} s"}, written
    if not result.is_file():
        return {"ok": False, "detail": f"its process {_how(status)} without a result"}, written
    return json.loads(result.read_text(encoding="utf-8")), written


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the row's session: its process, if that still runs, and every child it left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
