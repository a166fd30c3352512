"""An engine without a model whose requests wait, as paused ones do, until a push is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openrlhf.agents.engine import Generation
from openrlhf.rollout.engine import EngineHealth
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest


class PausedEngine:
    """Asserts that every method runs on the loop on which it was started, as an `InferenceEngine` may demand."""

    def __init__(self, spec: EngineSpec) -> None:
        self.name = spec.name
        self.requests = 0
        self.version = 0
        self.pushed = asyncio.Event()

    @staticmethod
    def environment(spec: EngineSpec) -> dict[str, str]:
        return {}

    async def start(self, *, serve: bool = True) -> None:
        self.loop = asyncio.get_running_loop()

    async def generate(self, request: GenerateRequest) -> Generation:
        self._check_loop()
        self.requests += 1
        await self.pushed.wait()
        return Generation(token_ids=request.token_ids, logprobs=[0.0], versions=[self.version], finish_reason="stop")

    async def health(self) -> EngineHealth:
        self._check_loop()
        return EngineHealth(version=self.version, running=self.requests, paused=not self.pushed.is_set(), unfit="")

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        self._check_loop()
        return [[0.0] * len(row) for row in rows]

    async def finish_weight_update(self, version: int) -> None:
        self._check_loop()
        self.version = version
        self.pushed.set()

    async def shutdown(self) -> None:
        self._check_loop()

    def _check_loop(self) -> None:
        assert asyncio.get_running_loop() is self.loop
