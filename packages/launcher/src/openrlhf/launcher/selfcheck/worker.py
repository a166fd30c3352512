"""The process of one row: `python -m openrlhf.launcher.selfcheck.worker FUNCTION FOLDER RESULT BOUND`."""

from __future__ import annotations

import faulthandler
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


def main(function: str, folder: str, result: str, bound_s: float) -> None:
    """Call the function and write what became of it."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(bound_s - DUMP_BEFORE_S, 0.1))
    signal.alarm(int(bound_s) + ORPHAN_S)
    os.environ.update(environment())
    module, _, name = function.partition(":")
    try:
        outcome = getattr(importlib.import_module(module), name)(Path(folder))
        said: dict[str, Any] = {"ok": True, "detail": outcome.detail, "numbers": outcome.numbers}
    except CheckError as error:
        said = {"ok": False, "detail": str(error)}
    except Exception as error:
        traceback.print_exc()
        said = {"ok": False, "detail": f"{type(error).__name__}: {error}"}
    finally:
        faulthandler.cancel_dump_traceback_later()
    Path(result).write_text(json.dumps(said), encoding="utf-8")


def environment() -> dict[str, str]:
    """A process group of one rank, and no look at a model hub: the models are made here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    return {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
