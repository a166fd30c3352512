"""One inference engine as an asynchronous Ray actor."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import ray

from openrlhf.agents.engine import Generation
from openrlhf.launcher.ray.devices import narrowed
from openrlhf.launcher.ray.remote import in_group, serves
from openrlhf.launcher.ray.scratch import Scratch
from openrlhf.launcher.ray.stopped import end_when_children_stop, end_when_stopped
from openrlhf.rollout.engine import EngineControl, engine_class, generate_many
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest, RequestFailure

T = TypeVar("T")

GENERATION, CONTROL = "generation", "control"
SLOTS = {GENERATION: 1000, CONTROL: 64}
"""Calls of each concurrency group that are served at the same time; further ones wait in the actor's queue.

Streams of requests never take the slots of control: those of paused requests keep theirs until a push is over, and a
sign of life must not wait for a sample to end.
"""


async def _on_engine(actor: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run a method of the actor's engine, from the loop of control calls."""
    return await actor.on_engine_loop(getattr(actor.engine, method)(*args, **kwargs))


@serves(EngineControl, _on_engine, group=CONTROL)
class EngineActor(EngineControl):
    """Hosts the engine that its spec names and has its control methods (make it with `engine_actor`).

    Ray gives each concurrency group an event loop in a thread of its own; the engine lives on the loop of generation,
    and control calls are handed over to it.
    """

    @in_group(GENERATION)
    async def start(self, spec: EngineSpec, *, serve: bool = False) -> float:
        """Load the model; returns the seconds that it took. serve: before the first weight push.

        Its environment is that of `InferenceEngine.environment`: given to the actor, since libraries read it early.
        """
        began = time.perf_counter()
        end_when_stopped(os.getpid(), spec.name)
        self._scratch = Scratch()
        self._scratch.use()
        # where Ray may not narrow the visible devices, vLLM would start every engine on the first one
        os.environ.update(narrowed(ray.get_runtime_context().get_accelerator_ids().get("GPU", []), os.environ))
        self._loop = asyncio.get_running_loop()
        self.engine = engine_class(spec)(spec)
        await self.engine.start(serve=serve)
        end_when_children_stop(f"the core of {spec.name}")
        return time.perf_counter() - began

    @in_group(GENERATION)
    async def generate_many(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[list[tuple[int, Generation | RequestFailure]]]:
        """Finished requests in chunks of (number, result), as they finish."""
        async for chunk in generate_many(self.engine.generate, list(requests)):
            yield chunk

    @in_group(CONTROL)
    async def shutdown(self) -> None:
        """End the engine and remove what it left in its temporary folder."""
        await self.on_engine_loop(self.engine.shutdown())
        self._scratch.close()

    async def on_engine_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` where the engine lives."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def engine_actor(kind: type[EngineActor] = EngineActor) -> Any:
    """The Ray actor class of engines; `.options(...).remote()` makes one."""
    remote: Any = ray.remote  # its annotations lack concurrency_groups
    return remote(concurrency_groups=SLOTS)(kind)
