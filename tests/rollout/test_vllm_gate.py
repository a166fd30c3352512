"""Requests that come together reach an idle core before its first step; a busy or paused one is not held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openrlhf.agents.engine import EngineError
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm import gate as gate_module
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.gate import Gate

SOON_S = 0.005


class Core:
    """Writes down what reaches it, and when it is held."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.log: list[str] = []
        self.breaks = breaks
        self.gate = Gate(self.hold, self.release)

    async def hold(self) -> None:
        await asyncio.sleep(SOON_S)
        if self.breaks:
            raise EngineError("gone")
        self.log.append("hold")

    async def release(self) -> None:
        self.log.append("release")

    async def request(self, name: str, *, idle: bool = True, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        await self.gate.enter(idle=idle)
        self.log.append(name)


def test_requests_that_come_together_arrive_before_the_core_begins() -> None:
    async def main() -> None:
        core = Core()
        await asyncio.gather(*(core.request(str(i), idle=i == 0) for i in range(20)))
        await core.gate.opened()
        assert core.log == ["hold", *map(str, range(20)), "release"]
        await core.request("again")
        await core.gate.opened()
        assert core.log[-3:] == ["hold", "again", "release"]

    asyncio.run(main())


def test_the_core_waits_for_those_that_come_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "WINDOW_S", 0.2)
    monkeypatch.setattr(gate_module, "LONGEST_S", 10.0)

    async def main() -> None:
        core = Core()
        await asyncio.gather(core.request("first"), core.request("later", after=0.1, idle=False))
        await core.gate.opened()
        assert core.log == ["hold", "first", "later", "release"]

    asyncio.run(main())


def test_the_core_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "LONGEST_S", 0.05)

    async def main() -> None:
        core = Core()
        coming = [core.request(str(i), after=0.002 * i, idle=i == 0) for i in range(200)]
        await asyncio.gather(*coming)
        await core.gate.opened()
        assert core.log[0] == "hold"
        assert core.log.index("release") < len(core.log) - 1

    asyncio.run(main())


def test_a_busy_core_is_not_held() -> None:
    async def main() -> None:
        core = Core()
        await core.request("more", idle=False)
        await core.gate.opened()
        assert core.log == ["more"]

    asyncio.run(main())


def test_a_core_that_cannot_be_held_gets_its_requests() -> None:
    async def main() -> None:
        core = Core(breaks=True)
        await asyncio.gather(core.request("a"), core.request("b"))
        await core.gate.opened()
        assert core.log == ["a", "b"]

    asyncio.run(main())


class Llm:
    """The calls that a request, a pause and a push make."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.errored = False
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> None:
            await asyncio.sleep(0)
            self.log.append(name)

        return call


@pytest.mark.parametrize("control", ["pause", "start_weight_update", "sleep"])
def test_a_pause_or_a_push_waits_until_the_core_is_released(control: str) -> None:
    async def main() -> None:
        engine = VllmEngine(EngineSpec(model="M", name="engine 0"))
        llm: Any = Llm()
        engine._llm = llm
        entering = asyncio.create_task(engine._gate.enter(idle=True))
        await asyncio.sleep(0)
        await getattr(engine, control)()
        await entering
        assert llm.log[:2] == ["pause_scheduler_async", "resume_scheduler_async"]
        assert len(llm.log) == 3

    asyncio.run(main())
