"""The task that looks after a judge's engines, over a fake fleet and fake agent workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.ray import judges
from openrlhf.launcher.ray.judges import Judges
from openrlhf.launcher.ray.remote import Remote

OLD, NEW = (Remote[Any](f"judge {name}", object()) for name in ("old", "new"))


class Fleet:
    """Engines that are gone once, or fail for good with an error."""

    def __init__(self, *gone: Any) -> None:
        self.looks = iter(gone)
        self.engines = [OLD]
        self.on_change: Any = None

    async def gone(self) -> Any:
        look = next(self.looks, {})
        if isinstance(look, Exception):
            raise look
        return look

    async def revive(self) -> None:
        self.engines = [NEW]

    async def announce(self) -> None:
        await self.on_change(self.engines)

    async def shutdown(self) -> None:
        self.engines = []


class Worker:
    """An agent worker that may have given an engine up."""

    def __init__(self, down: dict[str, str]) -> None:
        self.down = down
        self.told: list[Any] = []
        self.judges_down = SimpleNamespace(remote=self._judges_down)
        self.set_judges = SimpleNamespace(remote=self._set_judges)

    async def _judges_down(self) -> dict[str, str]:
        return self.down

    async def _set_judges(self, engines: list[Any]) -> None:
        self.told.append(engines)
        self.down = {}


def watch(fleet: Fleet, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What ended the run while the engines were watched for a moment."""
    monkeypatch.setattr(judges, "EngineFleet", lambda specs, spawn, serve: fleet)
    errors: list[BaseException] = []
    rollout: Any = SimpleNamespace(workers=[Remote("agent worker 0", worker)], fail=errors.append)

    async def main() -> None:
        watched = Judges([], lambda number: OLD)
        watched.watch(rollout, 0.01)
        await asyncio.sleep(0.2)
        await watched.shutdown()

    asyncio.run(main())
    return errors


def test_an_engine_that_is_gone_is_replaced_and_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, worker = Fleet({0: RuntimeError("died")}), Worker({})
    assert watch(fleet, worker, monkeypatch) == []
    assert worker.told == [[NEW]]
    assert fleet.engines == []  # ended with the run


def test_an_engine_that_a_worker_gave_up_serves_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker({"judge old": "silent"})
    assert watch(Fleet(), worker, monkeypatch) == []
    assert worker.told == [[OLD]]


def test_engines_that_cannot_be_mended_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("20 engines were lost")
    assert watch(Fleet(error), Worker({}), monkeypatch) == [error]
