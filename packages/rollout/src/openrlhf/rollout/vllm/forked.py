"""The engine core as a fork of the process that has imported vLLM already, for engines on CPU.

Upstream (vLLM 0.32): on CPU and inside Ray actors the core is spawned, so it imports vLLM and torch a second time: half
of the time that such an engine takes to start, and a gigabyte. vLLM's own default elsewhere is to fork. Can go once
vLLM lets CPU engines do so. VLLM_WORKER_MULTIPROC_METHOD=spawn brings vLLM's way back.
"""

from __future__ import annotations

import gc
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkProcess

from vllm.v1.engine import utils

from openrlhf.rollout.weights.plugin import end_with_parent

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
CHOICE = "get_mp_context"
"""How vLLM chooses the way in which it starts processes, in the module that starts cores."""


@contextmanager
def forked_core() -> Iterator[None]:
    """An engine that is made meanwhile forks its core, where the environment asks vLLM for that method."""
    method = os.environ.get(METHOD)
    if method != "fork":
        yield
        return
    original = getattr(utils, CHOICE)
    setattr(utils, CHOICE, _Context)
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later: this process has threads. What the core uses of them is let go of in `run`.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            yield
    finally:
        setattr(utils, CHOICE, original)
        os.environ[METHOD] = method  # vLLM's CPU platform has set it to spawn, for further engines too


class _Core(ForkProcess):
    """An engine core that has nothing of its parent but memory."""

    def run(self) -> None:
        # Never collected here: what speaks to Ray or to sockets when it ends belongs to the parent.
        gc.freeze()
        _leave_sockets()
        end_with_parent()  # a spawned core gets it from the plugin, which its parent has loaded here
        super().run()


class _Context(ForkContext):
    Process = _Core


def _leave_sockets() -> None:
    """Close this process' side of the parent's sockets: Ray sees the end of a process by the end of its connection.

    Their numbers stay taken, so an object that closes one later closes nothing else.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup2(nothing, int(name), inheritable=False)
        except OSError:  # the descriptor of the listing itself
            continue
    os.close(nothing)
