"""Real engines in a child process, driven one call at a time and without Ray.

One process hosts one engine after the other: importing vLLM takes as long as starting a small engine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from openrlhf.launcher.ray.stopped import children_of
from openrlhf.launcher.selfcheck.outcome import CheckError
from openrlhf.rollout.engine import InferenceEngine, engine_class
from openrlhf.rollout.engine_spec import EngineSpec

START_TIMEOUT = 400.0
CALL_TIMEOUT = 120.0
END_TIMEOUT = 30.0
HANDLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""What engines over CUDA IPC need, set for all: vLLM reads it once per process."""

P = ParamSpec("P")
R = TypeVar("R")

_running: dict[tuple[tuple[str, str], ...], EngineProcess] = {}


def start_engine(spec: EngineSpec, environ: Mapping[str, str]) -> EngineProcess:
    """An engine that serves, in the process for this environment (which GPU it sees); it ends the engine there before.

    Raises CheckError with vLLM's reason when it does not come up.
    """
    key = tuple(sorted(environ.items()))
    host = _running.get(key)
    if host is None or not host.alive:
        host = _running[key] = EngineProcess({**environ, **HANDLES})
    host.start(spec)
    return host


class EngineProcess:
    """The process and the engine in it. Make it with `start_engine`; it ends with the process that made it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(environ)), name="engines")
        self._process.start()
        theirs.close()
        self._asked = "start"
        self._left = 0
        util.Finalize(self, self._process.kill, exitpriority=1)  # before this process waits for its children

    @property
    def alive(self) -> bool:
        """Whether the process can be asked: it runs, and owes no answer."""
        return self._process.is_alive() and not self._left

    def start(self, spec: EngineSpec) -> None:
        """End the engine here, if there is one, and start another."""
        self._send("start", spec)
        self.answer(START_TIMEOUT)

    def ask(
        self,
        method: Callable[Concatenate[InferenceEngine, P], Coroutine[Any, Any, Any]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Start a coroutine of the engine; its `answer` must be fetched before the next."""
        self._send(method.__name__, (method.__name__, args, kwargs))

    def call(
        self,
        method: Callable[Concatenate[InferenceEngine, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """`ask` and `answer`."""
        self.ask(method, *args, **kwargs)
        return self.answer()

    def answer(self, timeout_s: float = CALL_TIMEOUT) -> Any:
        """The result of what was asked. Raises CheckError with the engine's error, or after the time-out."""
        if not self._pipe.poll(timeout_s):
            raise CheckError(f"the engine did not answer {self._asked!r} within {timeout_s:g} s")
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            self._process.join(END_TIMEOUT)
            status = self._process.exitcode
            raise CheckError(f"the engine's process ended in {self._asked!r} with status {status}") from None
        self._left -= 1
        if not ok:
            raise CheckError(f"the engine's {self._asked!r}: {value}")
        return value

    def kill_core(self) -> None:
        """End the engine's core, which holds the model, as the kernel does when memory is short."""
        assert self._process.pid is not None
        for pid in _children(self._process.pid):
            os.kill(pid, signal.SIGKILL)

    def _send(self, what: str, request: Any) -> None:
        self._asked = what
        self._left += 1
        self._pipe.send(request)


def _children(pid: int) -> list[int]:
    """Child processes but those in which multiprocessing itself keeps its books."""
    return [p for p in children_of(pid) if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]


def _serve(pipe: Connection, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    asyncio.run(_serve_async(pipe))


async def _serve_async(pipe: Connection) -> None:
    engine: InferenceEngine | None = None
    while (request := await asyncio.to_thread(_receive, pipe)) is not None:
        try:
            if isinstance(request, EngineSpec):
                if engine is not None:
                    await engine.shutdown()
                engine = engine_class(request)(request)
                value = await engine.start()
            else:
                method, args, kwargs = request
                value = await getattr(engine, method)(*args, **kwargs)
            pipe.send((True, value))
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the row's process is gone
        return None
