"""Engines that serve adapters in another way than ours: from a folder, and with the faults that a run must notice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

from openrlhf.agents.engine import Generation
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest
from openrlhf.rollout.vllm import engine as module
from openrlhf.rollout.vllm.arguments import ADAPTER_ID, adapter_request, to_vllm_prompt
from openrlhf.rollout.vllm.engine import VllmEngine

FOLDER = "OPENRLHF_TEST_ADAPTER"
"""The environment variable that names the folder of an exported adapter."""


class AdapterFromFolder(VllmEngine):
    """vLLM's own way: a request names a folder with an adapter, which vLLM reads."""

    async def start(self, *, serve: bool = True) -> None:
        from vllm.lora.request import LoRARequest

        await super().start(serve=serve)
        self._adapter = LoRARequest("exported", ADAPTER_ID, os.environ[FOLDER])


class FaultyAdapters(VllmEngine):
    """fault: what goes wrong from now on ("sampled without", "scored without", "stale cache"); empty: nothing."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.fault = ""
        self._one_by_one = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Generation:
        async with self._without_adapter(self.fault == "sampled without"):
            return await super().generate(request)

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        async with self._without_adapter(self.fault == "scored without"):
            return await super().score(rows)

    @asynccontextmanager
    async def _without_adapter(self, active: bool) -> AsyncIterator[None]:
        async with self._one_by_one:
            adapter = self._adapter
            self._adapter = None if active else adapter
            try:
                yield
            finally:
                self._adapter = adapter

    async def _renew(self, version: int) -> None:
        """stale cache: prefixes are neither forgotten nor told apart by the version."""
        if self.fault != "stale cache":
            await super()._renew(version)
            return
        await self._set_version(version)
        self._adapter = adapter_request(0)

    async def start(self, *, serve: bool = True) -> None:
        await super().start(serve=serve)

        def prompt(request: GenerateRequest, ids: list[int], spec: EngineSpec, version: int) -> dict[str, Any]:
            return to_vllm_prompt(request, ids, spec, 0 if self.fault == "stale cache" else version)

        mock.patch.object(module, "to_vllm_prompt", prompt).start()
