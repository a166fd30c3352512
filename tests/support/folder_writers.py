"""Processes that write into folders, to be killed at any moment: `folder_writers.py WHAT FOLDER ...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf.learner.folders.lock import FolderInUseError, hold
from openrlhf.learner.folders.publish import publish

NAMES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "ema/config.json")


def write_model(folder: Path, version: int, *, shards: int = 1) -> None:
    """A model that says in every file which version it is; versions differ in the files that they have."""
    (folder / "ema").mkdir()
    for name in NAMES:
        (folder / name).write_text(f"{name} {version}")
    for number in range(shards):
        (folder / f"part{version % 3}-{number}.bin").write_text(f"part {version}")


def exports(folder: str, first: int) -> None:
    """Export versions without end."""
    version = first
    while True:
        held = hold(folder, "--ckpt.output_dir")
        with publish(folder) as fresh:
            write_model(fresh, version, shards=3)
        held.release()
        print(version, flush=True)
        version += 1


def holds(folder: str) -> None:
    """Hold the folder until killed, and say so."""
    hold(folder, "--ckpt.path")
    print("held", flush=True)
    time.sleep(600)


def tries(folder: str) -> None:
    """Say what becomes of an attempt to hold the folder."""
    try:
        hold(folder, "--ckpt.path").release()
    except FolderInUseError as error:
        print(error, flush=True)
    else:
        print("free", flush=True)


def export_stopped_at(folder: str, version: int, step: int) -> None:
    """Export a version and die, as by SIGKILL, before the `step`-th change to the folder."""
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in ("replace", "rename", "mkdir", "rmdir", "unlink", "chmod"):  # pathlib calls them, too
        setattr(os, name, counted(getattr(os, name)))
    with publish(folder) as fresh:
        write_model(fresh, version)
    print("done", flush=True)


if __name__ == "__main__":
    what, place, *numbers = sys.argv[1:]
    {"exports": exports, "holds": holds, "tries": tries, "stopped": export_stopped_at}[what](place, *map(int, numbers))
