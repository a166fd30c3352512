"""Runs on real folders with tiny payloads, each in a forked process that may die before any of its changes."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.learner import checkpoint_dir
from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.folders.files import exchange
from openrlhf.learner.folders.lock import hold
from openrlhf.learner.folders.publish import in_the_way, publish, recover, taken_message, write_text
from openrlhf.learner.folders.trial import try_folder

KILLED, REFUSED, BROKEN = 9, 3, 4
EXPORTED = ("config.json", "model.safetensors", "tokenizer.json", "ema/config.json", "ema/model.safetensors")
PAYLOAD = ("actor/w.bin", "state/trainer.json")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: where it exports and saves, how many checkpoints it writes, before which change it dies (never: None)."""

    out: Path
    ckpt: Path
    saves: int = 2
    shards: int = 1
    resume: bool = False
    dies: int | None = None
    can_exchange: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended, and the steps of the checkpoints that it reported as saved."""

    status: int
    saved: list[int]


def execute(run: Run, version: int) -> Outcome:
    """Do it in a process of its own."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside the threads of test tools
        child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            _mortal(run)
            status = _run(run, version, lambda step: os.write(writing, f"{step}\n".encode()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as lines:
        saved = [int(line) for line in lines]
    return Outcome(status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), saved=saved)


def _run(run: Run, version: int, saved: Callable[[int], Any]) -> int:
    """In the order of `launcher.outputs.hold_outputs`, the trainer and its end."""
    store, held = CheckpointStore(run.ckpt, max_num=2), ExitStack()
    try:
        for folder, flag in ((run.out, "--ckpt.output_dir"), (run.ckpt, "--ckpt.path")):
            held.callback(hold(folder, flag).release)
            try_folder(folder, flag)
        recover(run.out)
        if trouble := in_the_way(run.out, []):
            raise ValueError(taken_message(run.out, trouble, "--ckpt.output_dir"))
        store.check(resume=run.resume)
        write_text(run.out, ("config.toml", "openrlhf_config.toml"), f"version {version}", part="run")
        with publish(run.out, trial=True) as fresh:
            write_export(fresh, version, run.shards)
    except ValueError:
        held.close()
        return REFUSED
    newest = store.latest() if run.resume else None
    first = 1 if newest is None else newest.step + 1
    for step in range(first, first + run.saves):
        pending = store.begin(step)
        for name in PAYLOAD:
            (pending / name).parent.mkdir()
            (pending / name).write_text(f"{step} of {version}")
        store.commit(step)
        saved(step)
    with publish(run.out) as fresh:
        write_export(fresh, version, run.shards)
    held.close()
    return 0


def write_export(folder: Path, version: int, shards: int) -> None:
    """A model whose every file says its version."""
    (folder / "ema").mkdir()
    for name in (*EXPORTED, *(f"model-{number}.safetensors" for number in range(shards))):
        (folder / name).write_text(f"version {version}")


def _mortal(run: Run) -> None:
    """Let this process die before its n-th change of a folder, and swap names only where it can."""
    left = [run.dies]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)
            return call(*args, **kwargs)

        return wrapper

    for name in ("replace", "rename", "mkdir", "rmdir", "unlink", "link", "chmod"):  # pathlib calls them, too
        setattr(os, name, counted(getattr(os, name)))
    setattr(checkpoint_dir, "exchange", counted(exchange if run.can_exchange else _cannot))  # noqa: B010  not its own


def _cannot(one: Path, other: Path) -> bool:
    del one, other
    return False


def damaged(checkpoint: Path) -> list[str]:
    """What is missing or mixed in a checkpoint that counts as complete."""
    step = json.loads((checkpoint / "metric.json").read_text())["step"]
    texts = {name: (checkpoint / name).read_text() if (checkpoint / name).exists() else "missing" for name in PAYLOAD}
    versions = {text.partition(" of ")[2] for text in texts.values()}
    wrong = [f"{name}: {text}" for name, text in texts.items() if not text.startswith(f"{step} of ")]
    return wrong + ([f"mixed: {texts}"] if len(versions) > 1 else [])
