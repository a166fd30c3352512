"""Real engines for tests: one host process with an event loop, and a proxy to call it from the test process.

vLLM stays out of the test process, so its import-time warnings, environment and random state do too.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from openrlhf.rollout.engine_spec import EngineSpec

START_TIMEOUT = 900.0  # two engines take 50 s of CPU time; the machine may be busy
CALL_TIMEOUT = 180.0


class RemoteError(RuntimeError):
    """An exception of the host process: `kind` is its type's name."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class EngineHost:
    """Engines by name in one process. `submit` returns a future, `call` waits for it."""

    def __init__(self, specs: Sequence[EngineSpec]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, list(specs)), name="engine-host")
        self.process.start()
        theirs.close()
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[Any]] = {0: Future()}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._futures[0].result(START_TIMEOUT)

    def submit(self, engine: str, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._futures[number] = future
            self._pipe.send((number, engine, method, args, kwargs))
        return future

    def call(self, engine: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.submit(engine, method, *args, **kwargs).result(CALL_TIMEOUT)

    def children(self) -> list[int]:
        """Process ids of the host's children: the engine cores and what belongs to them."""
        return _children(self.process.pid or 0)

    def close(self) -> None:
        """Shut the engines down and end the host."""
        if self.process.is_alive():
            self._pipe.send(None)
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self._reader.join(10)
        self._pipe.close()

    def _read(self) -> None:
        try:
            while True:
                number, ok, value = self._pipe.recv()
                future = self._futures.pop(number)
                if ok:
                    future.set_result(value)
                else:
                    future.set_exception(RemoteError(*value))
        except (EOFError, OSError):
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(RemoteError("EOFError", "the engine host ended", ""))


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat.rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def _serve(pipe: Connection, specs: list[EngineSpec]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    asyncio.run(_serve_async(pipe, specs))


async def _serve_async(pipe: Connection, specs: list[EngineSpec]) -> None:
    from openrlhf.rollout.engine import engine_class, generate_many

    engines = {spec.name: engine_class(spec)(spec) for spec in specs}
    try:
        for engine in engines.values():
            await engine.start()
    except Exception as error:
        pipe.send((0, False, (type(error).__name__, str(error), traceback.format_exc())))
        return
    pipe.send((0, True, None))

    async def serve(number: int, name: str, method: str, args: Any, kwargs: Any) -> None:
        try:
            if method == "generate_many":
                value = [chunk async for chunk in generate_many(engines[name].generate, *args)]
            else:
                value = await getattr(engines[name], method)(*args, **kwargs)
            pipe.send((number, True, value))
        except Exception as error:
            pipe.send((number, False, (type(error).__name__, str(error), traceback.format_exc())))

    tasks = set()
    while (message := await asyncio.to_thread(_receive, pipe)) is not None:
        task = asyncio.create_task(serve(*message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for engine in engines.values():
        await engine.shutdown()


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the test process is gone
        return None
