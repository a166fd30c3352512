"""An engine actor without vLLM whose streams wait, as those of paused requests do, until a push is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from openrlhf.launcher.ray.engine_actor import EngineActor


class PausedEngine:
    """Every method runs on one loop, as `VllmEngine` demands."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.streams = 0
        self.more = asyncio.Event()
        self.pushed = asyncio.Event()

    async def generate_many(self, requests: Sequence[Any]) -> AsyncIterator[list[Any]]:
        self.streams += 1
        self.more.set()
        await self.pushed.wait()
        yield [(0, requests[0])]

    async def until_full(self, streams: int) -> None:
        while self.streams < streams:
            self.more.clear()
            await self.more.wait()

    async def health(self) -> dict[str, Any]:
        return {"running": self.streams, "same_loop": asyncio.get_running_loop() is self.loop}

    async def score(self, row: Sequence[int]) -> list[float]:
        assert asyncio.get_running_loop() is self.loop
        return [0.0] * len(row)

    async def finish_weight_update(self, version: int) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.pushed.set()


class BusyEngineActor(EngineActor):
    """`EngineActor` with a `PausedEngine`."""

    async def start(self, spec: Any, *, serve: bool = False) -> int:
        self._loop = asyncio.get_running_loop()
        engine: Any = PausedEngine()
        self._engine = engine
        return 0
