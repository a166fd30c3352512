"""One vLLM engine as an asynchronous Ray actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from openrlhf.launcher.ray.devices import narrowed
from openrlhf.launcher.ray.scratch import Scratch
from openrlhf.rollout.vllm.arguments import environment

if TYPE_CHECKING:
    from openrlhf.rollout.engine_spec import EngineSpec
    from openrlhf.rollout.requests import GenerateRequest

T = TypeVar("T")

STREAMS = 1000
"""Streams of requests that are served at the same time; further ones wait in the actor's queue."""
CONTROL = "control"
CONTROL_SLOTS = 64
"""Slots for everything else. Streams never take them: paused streams keep theirs until a push is over, and a sign of
life must not wait for a sample to end."""


class EngineActor:
    """Hosts a `VllmEngine`. Streams and control calls have slots of their own (make it with `engine_actor`).

    Ray gives each kind an event loop in a thread of its own; the engine lives on the loop of the streams, and control
    calls are handed over to it.
    """

    async def start(self, spec: EngineSpec, *, serve: bool = False) -> int:
        """Load the model; returns this process' id. serve: before the first weight push.

        Environment first: vLLM reads it when it is imported.
        """
        self._scratch = Scratch()
        self._scratch.use()
        for name, value in environment(spec).items():
            os.environ.setdefault(name, value)
        # where Ray may not narrow the visible devices, vLLM would start every engine on the first one
        os.environ.update(narrowed(ray.get_runtime_context().get_accelerator_ids().get("GPU", []), os.environ))
        from openrlhf.rollout.vllm.engine import VllmEngine

        self._loop = asyncio.get_running_loop()
        self._engine = VllmEngine(spec)
        await self._engine.start(serve=serve)
        return os.getpid()

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Any]]:
        """Finished requests in chunks of (number, Generation | RequestFailure), as they finish."""
        async for chunk in self._engine.generate_many(list(requests)):
            yield chunk

    @ray.method(concurrency_group=CONTROL)
    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of fixed tokens, one list per row."""
        return [await self._on_engine_loop(self._engine.score(row)) for row in rows]

    @ray.method(concurrency_group=CONTROL)
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Any other coroutine of the engine."""
        return await self._on_engine_loop(getattr(self._engine, method)(*args, **kwargs))

    @ray.method(concurrency_group=CONTROL)
    async def shutdown(self) -> None:
        """End the engine and remove what it left in its temporary folder."""
        await self._on_engine_loop(self._engine.shutdown())
        self._scratch.close()

    async def _on_engine_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def engine_actor(kind: type[EngineActor] = EngineActor) -> Any:
    """The Ray actor class of engines; `.options(...).remote()` makes one."""
    remote: Any = ray.remote  # its annotations lack concurrency_groups
    return remote(concurrency_groups={CONTROL: CONTROL_SLOTS}, max_concurrency=STREAMS)(kind)
