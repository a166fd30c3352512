"""One vLLM engine as an asynchronous Ray actor."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import ray

from openrlhf.launcher.ray.devices import narrowed
from openrlhf.launcher.ray.scratch import Scratch

if TYPE_CHECKING:
    from openrlhf.rollout.engine_spec import EngineSpec
    from openrlhf.rollout.requests import GenerateRequest


class EngineActor:
    """Hosts a `VllmEngine`; every method is a coroutine on the engine's own loop."""

    async def start(self, spec: EngineSpec, *, serve: bool = False) -> int:
        """Load the model; returns this process' id. serve: before the first weight push.

        Environment first: vLLM reads it when it is imported.
        """
        self._scratch = Scratch()
        self._scratch.use()
        for name, value in spec.environment().items():
            os.environ.setdefault(name, value)
        # where Ray may not narrow the visible devices, vLLM would start every engine on the first one
        os.environ.update(narrowed(ray.get_runtime_context().get_accelerator_ids().get("GPU", []), os.environ))
        from openrlhf.rollout.engine import VllmEngine

        self._engine = VllmEngine(spec)
        await self._engine.start(serve=serve)
        return os.getpid()

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Any]]:
        """Finished requests in chunks of (number, Generation | RequestFailure), as they finish."""
        async for chunk in self._engine.generate_many(list(requests)):
            yield chunk

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of fixed tokens, one list per row."""
        return [await self._engine.score(row) for row in rows]

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Any other coroutine of the engine."""
        return await getattr(self._engine, method)(*args, **kwargs)

    async def shutdown(self) -> None:
        """End the engine and remove what it left in its temporary folder."""
        await self._engine.shutdown()
        self._scratch.close()
