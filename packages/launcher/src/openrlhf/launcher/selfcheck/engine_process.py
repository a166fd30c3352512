"""A real engine in a child process, driven one call at a time and without Ray."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from openrlhf.launcher.selfcheck.outcome import CheckError
from openrlhf.rollout.engine import InferenceEngine, engine_class
from openrlhf.rollout.engine_spec import EngineSpec

P = ParamSpec("P")
R = TypeVar("R")

START_TIMEOUT = 400.0
CALL_TIMEOUT = 120.0
END_TIMEOUT = 30.0


class EngineProcess:
    """One engine. environ: further variables of its process (which GPU it sees). Use it in a `with`."""

    def __init__(self, spec: EngineSpec, environ: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec, dict(environ)), name=spec.name)
        self._process.start()
        theirs.close()
        self._asked = "start"

    def __enter__(self) -> EngineProcess:
        self.answer(START_TIMEOUT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.is_alive() and error is None:
            self._pipe.send(None)
            self._process.join(END_TIMEOUT)
        self._process.kill()
        self._process.join(END_TIMEOUT)

    def ask(
        self,
        method: Callable[Concatenate[InferenceEngine, P], Coroutine[Any, Any, Any]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Start a coroutine of the engine; its `answer` must be fetched before the next."""
        self._asked = method.__name__
        self._pipe.send((self._asked, args, kwargs))

    def answer(self, timeout_s: float = CALL_TIMEOUT) -> Any:
        """The result of what was asked. Raises CheckError with the engine's error, or after the time-out."""
        if not self._pipe.poll(timeout_s):
            raise CheckError(f"the engine did not answer {self._asked!r} within {timeout_s:g} s")
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            self._process.join(END_TIMEOUT)
            raise CheckError(
                f"the engine's process ended in {self._asked!r} with status {self._process.exitcode}"
            ) from None
        if not ok:
            raise CheckError(f"the engine's {self._asked!r}: {value}")
        return value

    def call(
        self,
        method: Callable[Concatenate[InferenceEngine, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """`ask` and `answer`."""
        self.ask(method, *args, **kwargs)
        return self.answer()


def _serve(pipe: Connection, spec: EngineSpec, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    asyncio.run(_serve_async(pipe, spec))


async def _serve_async(pipe: Connection, spec: EngineSpec) -> None:
    engine = engine_class(spec)(spec)
    asked: tuple[str, tuple[Any, ...], dict[str, Any]] | None = ("start", (), {})
    while asked is not None:
        method, args, kwargs = asked
        try:
            pipe.send((True, await getattr(engine, method)(*args, **kwargs)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))
        asked = await asyncio.to_thread(_receive, pipe)
    await engine.shutdown()


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the row's process is gone
        return None
