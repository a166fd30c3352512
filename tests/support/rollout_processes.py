"""Processes for the test that an engine core ends with its parent."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection


def core(pipe: Connection) -> None:
    """Stands for vLLM's engine core: watches its parent, as the plugin makes it do, and idles."""
    from openrlhf.rollout.weights.plugin import end_with_parent

    end_with_parent()
    pipe.send("up")
    time.sleep(120)


def parent(name: str, pipe: Connection) -> None:
    """Stands for the engine's actor: starts a core under this process name, reports its id, and idles."""
    context = multiprocessing.get_context("spawn")
    up, theirs = context.Pipe()
    child = context.Process(target=core, args=(theirs,), name=name)
    child.start()
    up.recv()
    pipe.send(child.pid)
    time.sleep(120)
