"""All engines of a run: start, restart, sleep, and whether they may serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import ray
from ray.exceptions import RayError

from openrlhf.launcher.ray.calls import WorkerDiedError, first_line, gather
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.remote import Remote, ask_all, ask_living
from openrlhf.rollout.engine import EngineControl
from openrlhf.rollout.engine_spec import EngineSpec

log = logging.getLogger(__name__)

START_TIMEOUT = 1800.0
STEP_TIMEOUT = 600.0
"""Bound of pausing, falling asleep and waking."""
PING_TIMEOUT = 75.0
"""Longer than an engine's own bound for a sign of life: its core answers between two model steps only."""
MAX_REPLACED = 20
"""Engines that may be lost in one run before it ends: engines that always die are no accident."""

SpawnEngine = Callable[[int], Remote[EngineActor]]
"""Engine number -> a new, empty engine actor on its place."""


class EngineFleet:
    """The engines and their state.

    serve: they serve the model that they load, and no weights are pushed.
    fit: whether all hold whole weights; else they must not serve.
    on_change: called by `announce` with the current actors after one was replaced, so that agent workers learn of it.
    state: what of the engines is in device memory; "weights" is half awake, without room to sample.
    lock: held while weights travel or change and while engines fall asleep or wake.
    """

    def __init__(self, specs: Sequence[EngineSpec], spawn: SpawnEngine, *, serve: bool = False) -> None:
        self.specs = list(specs)
        self._spawn = spawn
        self.engines = [spawn(i) for i in range(len(specs))]
        self._serve = serve
        self.fit = serve
        self.replaced = 0
        self.state: Literal["awake", "weights", "asleep"] = "awake"
        self.lock = asyncio.Lock()
        self.on_change: Callable[[Sequence[Remote[EngineActor]]], Awaitable[None]] | None = None
        self._unannounced = False
        self._totals: dict[str, float] = {}
        self._starting = self._start(range(len(specs)))

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def shares_devices(self) -> bool:
        """Whether engines have to sleep while models work (--vllm.enable_sleep)."""
        return self.specs[0].enable_sleep

    def _start(self, numbers: Sequence[int]) -> list[ray.ObjectRef[float]]:
        return [self.engines[i].ask(EngineActor.start, self.specs[i], serve=self._serve) for i in numbers]

    async def wait_started(self) -> list[float]:
        """Until every engine has its model: the seconds of loading. Raises WorkerDiedError with the engine's name."""
        return await gather(self._starting, what="engine start", names=self.names, timeout=START_TIMEOUT)

    async def sleep(self) -> None:
        """Free the engines' device memory: weights go to host memory, the KV cache is dropped."""
        if self.state != "asleep":
            log.info("engines sleep")
            await ask_living(self.engines, "engine sleep", STEP_TIMEOUT, EngineControl.sleep)
            self.state = "asleep"

    async def wake_weights(self) -> None:
        """The first half of waking: enough to take weights."""
        if self.state == "asleep":
            log.info("engines wake: weights")
            await ask_living(self.engines, "engine wake-up", STEP_TIMEOUT, EngineControl.wake, "weights")
            self.state = "weights"

    async def wake_cache(self) -> None:
        """The second half of waking: room to sample."""
        if self.state == "weights":
            log.info("engines wake: KV cache")
            await ask_living(self.engines, "engine wake-up", STEP_TIMEOUT, EngineControl.wake, "kv_cache")
            self.state = "awake"

    async def metrics(self) -> dict[str, float]:
        """What the living engines measured since the last call; empty where they do not."""
        if not self.specs[0].stats:
            return {}
        answers = await ask_living(self.engines, "engine measurements", PING_TIMEOUT, EngineControl.health)
        totals: dict[str, float] = {}
        for answer in answers:
            for name, value in answer.totals.items():
                totals[name] = totals.get(name, 0.0) + value
        before, self._totals = self._totals, totals
        return engine_metrics({name: value - before.get(name, 0.0) for name, value in totals.items()})

    async def gone(self, *, after_push: bool = False) -> dict[int, BaseException]:
        """Numbers of the engines that are dead or silent, with what was seen of them.

        after_push: a push has failed; engines that do not come out of it count as gone.
        """
        method = EngineControl.give_up_push if after_push else EngineControl.health
        calls = [ask_all([engine], "engine health", PING_TIMEOUT, method) for engine in self.engines]
        pings = await asyncio.gather(*calls, return_exceptions=True)
        return {i: ping for i, ping in enumerate(pings) if isinstance(ping, BaseException)}

    async def revive(self, *, after_push: bool = False) -> list[str]:
        """Replace engines that are gone or silent; returns their names. The new ones need a push before they serve.

        Raises WorkerDiedError when too many were lost in this run.
        """
        gone = await self.gone(after_push=after_push)
        names = [self.names[i] for i in gone]
        if not gone:
            return []
        self.replaced += len(gone)
        if self.replaced > MAX_REPLACED:
            raise WorkerDiedError(f"{self.replaced} engines were lost, the last one: {first_line(gone.popitem()[1])}")
        self.fit = self._serve
        self._unannounced = True
        for i, why in gone.items():
            log.warning("%s is gone (%s): starting it again", self.names[i], first_line(why))
            self.engines[i].kill()
            self.engines[i] = self._spawn(i)
        await gather(self._start(list(gone)), what="engine restart", names=names, timeout=START_TIMEOUT)
        await self._put_to_sleep([self.engines[i] for i in gone])
        return names

    async def _put_to_sleep(self, engines: Sequence[Remote[EngineActor]]) -> None:
        """Bring new engines into the state of the others."""
        if self.state != "awake":
            await ask_all(engines, "engine sleep", STEP_TIMEOUT, EngineControl.sleep)
        if self.state == "weights":
            await ask_all(engines, "engine wake-up", STEP_TIMEOUT, EngineControl.wake, "weights")

    async def announce(self) -> None:
        """Tell the agent workers of replaced engines, which hold the current weights by now."""
        if self._unannounced and self.on_change is not None:
            await self.on_change(self.engines)
            self._unannounced = False

    async def shutdown(self) -> None:
        """Ask every engine to end, then end it."""
        try:
            await ask_all(self.engines, "engine shutdown", 20, EngineActor.shutdown)
        except (WorkerDiedError, RayError) as error:
            log.debug("engine shutdown: %s", error)
        for engine in self.engines:
            engine.kill()


def engine_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """Means and rates of what all engines measured in a span of time (names as in `EngineHealth.totals`).

    Nothing is told of a span in which an engine was replaced: its totals begin anew.
    """
    if not measured or min(measured.values()) < 0 or not measured.get("iterations"):
        return {}
    means = {"kv_cache_usage": "kv_cache_usage", "running": "running_requests", "waiting": "waiting_requests"}
    found = {f"engine/{means[n]}": measured[n] / measured["iterations"] for n in means if n in measured}
    if measured.get("prefix_queries"):
        found["engine/prefix_cache_hit_rate"] = measured.get("prefix_hits", 0.0) / measured["prefix_queries"]
    if "preempted" in measured:
        found["engine/preempted_requests"] = measured["preempted"]
    return found
