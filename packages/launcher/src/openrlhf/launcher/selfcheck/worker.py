"""The process of rows: `python -m openrlhf.launcher.selfcheck.worker FOLDER`, with a job per line on its input."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from openrlhf.launcher.selfcheck.outcome import CheckError

DUMP_BEFORE_S = 2.0
"""So long before the bound a row that hangs writes where it does."""
ORPHAN_S = 30
"""So long after the bound a row ends itself, when nobody is left to end it."""


def main(folder: Path) -> None:
    """Run what the lines ask for, until there are no more."""
    for line in sys.stdin:
        job = json.loads(line)
        run_row(folder, job["name"], job["function"], job["bound_s"])
    if "torch" in sys.modules:
        from openrlhf.learner.setup import leave_distributed

        leave_distributed()


def run_row(folder: Path, name: str, function: str, bound_s: float) -> None:
    """Call the function and write what became of it; what it prints goes to a log of its own."""
    work = folder / name
    work.mkdir()
    with (folder / f"{name}.log").open("wb") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(bound_s - DUMP_BEFORE_S, 0.1))
    signal.alarm(int(bound_s) + ORPHAN_S)
    os.environ.update(environment())
    try:
        said = _outcome(function, work)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
    sys.stdout.flush()
    written = folder / f"{name}.part"
    written.write_text(json.dumps(said), encoding="utf-8")
    _give_back()
    written.rename(folder / f"{name}.json")


def _outcome(function: str, work: Path) -> dict[str, Any]:
    module, _, name = function.partition(":")
    try:
        outcome = getattr(importlib.import_module(module), name)(work)
        return {"ok": True, "detail": outcome.detail, "numbers": outcome.numbers}
    except CheckError as error:
        return {"ok": False, "detail": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"ok": False, "detail": f"{type(error).__name__}: {error}"}


def _give_back() -> None:
    """Free what the row's models held, for the next row in this process."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def environment() -> dict[str, str]:
    """A process group of one rank, and no look at a model hub: the models are made here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    return {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
