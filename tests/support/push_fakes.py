"""Weight pushes over fake engines and ranks, which write every call down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.agents.engine import Generation
from openrlhf.launcher.ray import engine_fleet, remote, weight_push
from openrlhf.launcher.ray.calls import WorkerDiedError
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.engine_watch import EngineWatch
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.weight_push import CheckPlan, Pause, WeightPush
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.sync_check import Tolerance


class Method:
    """`actor.method.remote(...)`: writes itself down and gives an awaitable."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        async def answer() -> Any:
            return self._call(*args, **kwargs)

        return answer()


class Stream(Method):
    """`actor.generate_many`: every request is answered by the token 1, all in one chunk."""

    async def remote(self, requests: Any) -> Any:
        async def chunk() -> Any:
            self._call()
            answer = Generation(token_ids=[1], logprobs=[0.0], versions=[0], finish_reason="length")
            return [(number, answer) for number in range(len(requests))]

        yield chunk()


class FakeEngine:
    """dies: the method during which it is gone, once."""

    def __init__(self, name: str, log: list[str], dies: str = "") -> None:
        self.name, self.log, self.dies, self.dead = name, log, dies, False

    def __getattr__(self, method: str) -> Method:
        def call(*args: Any, **kwargs: Any) -> list[list[float]] | None:
            if method == "start":
                self.log.append(f"{self.name} start")
                return None
            self._note(" ".join(str(part) for part in (method, *(args if method == "wake" else ()), *kwargs.values())))
            return [[0.0] * len(row) for row in args[0]] if method == "score" else None

        if method == "generate_many":
            return Stream(call)
        return Method(call)

    def _note(self, what: str) -> None:
        self.dead |= what == self.dies
        if self.dead:
            raise WorkerDiedError(f"{self.name} died")
        if what not in ("health", "give_up_push"):
            self.log.append(f"{self.name} {what}")


class FakePolicy:
    """A `RankGroup` of one rank."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @property
    def processes(self) -> list[Any]:
        return [SimpleNamespace(ask=self.ask_process)]

    def ask_process(self, method: Any, *args: Any) -> str:
        name = method.__name__
        return " ".join([name, *(str(a) for a in args if name == "push")])

    def ask(self, method: Any, rows: Any) -> Any:
        return method, rows

    async def wait(self, refs: Any, what: str, timeout: float = 0) -> list[Any]:
        if isinstance(refs, tuple):
            return [[[0.0] * len(row) for row in refs[1]]]
        refs = refs[0] if isinstance(refs, list) else refs
        if refs.startswith(("push", "open")):
            self.log.append(refs)
        return [SimpleNamespace(nbytes=10, for_engine=lambda offset: {"rank_offset": offset})]


class BreaksOnce(FakePolicy):
    """Its first push fails."""

    broken = False

    async def wait(self, refs: Any, what: str, timeout: float = 0) -> list[Any]:
        answer = await super().wait(refs, what, timeout)
        if str(refs).startswith("push") and not self.broken:
            self.broken = True
            raise RuntimeError("the push broke")
        return answer


CHECK = CheckPlan(prompts=[[5, 6], [7]], answer_tokens=2, tolerance=Tolerance(value=1e-3, source="a test"))


class World:
    """Two engines; engine 0 of the first generation dies in `dies`."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        dies: str = "",
        pause: Pause | None = None,
        backend: Any = "gloo",
        sleeps: bool = False,
        reservation: Any = None,
    ) -> None:
        async def gather(refs: Any, *, what: str, names: Any, timeout: float) -> list[Any]:
            return list(await asyncio.gather(*refs))

        for module in (remote, engine_fleet, weight_push):
            monkeypatch.setattr(module, "gather", gather)
        monkeypatch.setattr("ray.kill", lambda actor: self.log.append(f"{actor.name} killed"))
        monkeypatch.setattr(weight_push, "OTHER_SIDE_TIMEOUT", 1)
        self.log: list[str] = []
        self.spawned: list[FakeEngine] = []

        def spawn(number: int) -> Remote[EngineActor]:
            first = len(self.spawned) == 0
            self.spawned.append(FakeEngine(f"e{len(self.spawned)}", self.log, dies if first else ""))
            return Remote(f"engine {number}", self.spawned[-1])

        specs = [EngineSpec(model="M", name=f"engine {i}", sync_backend=backend, enable_sleep=sleeps) for i in range(2)]
        self.fleet = EngineFleet(specs, spawn, reservation=reservation)
        self.policy: Any = FakePolicy(self.log)
        self.push = WeightPush(self.fleet, bucket_mb=1, check=CHECK, pause=pause)
        self.announced: list[list[str]] = []
        self.fleet.on_change = self.engines_changed
        self.down: dict[str, str] = {}

    async def engines_changed(self, engines: Any) -> None:
        self.announced.append([engine.actor.name for engine in engines])

    async def engines_down(self) -> dict[str, str]:
        return self.down

    def watch(self) -> EngineWatch:
        return EngineWatch(self.fleet, partial(self.push.recover, self.policy), self, [self.policy], 1.0)  # type: ignore[arg-type]

    async def started(self) -> World:
        await self.fleet.wait_started()
        self.log.clear()
        return self
