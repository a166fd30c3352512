"""All engines of a run: start, restart, sleep, and whether they may serve."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import ray
from ray.exceptions import RayError

from openrlhf.launcher.placement import ENGINE
from openrlhf.launcher.ray.calls import WorkerDiedError, first_line, gather
from openrlhf.launcher.ray.engine_actor import EngineActor, engine_actor
from openrlhf.launcher.ray.placement import NoRoomError, Reservation
from openrlhf.launcher.ray.remote import Remote, ask_all, ask_living
from openrlhf.launcher.ray.warm import runtime_env
from openrlhf.rollout.engine import EngineControl, engine_class
from openrlhf.rollout.engine_spec import EngineSpec

log = logging.getLogger(__name__)

START_TIMEOUT = 1800.0
STEP_TIMEOUT = 600.0
"""Bound of pausing, falling asleep and waking."""
PING_TIMEOUT = 75.0
"""Longer than an engine's own bound for a sign of life: its core answers between two model steps only."""
MAX_REPLACED = 20
"""Engines that may be lost in one run before it ends: engines that always die are no accident."""

PLACE_INTERVAL = 2.0
"""Seconds between two looks whether the machine is still there on which an engine is to start."""

SpawnEngine = Callable[[int], Remote[EngineActor]]
"""Engine number -> a new, empty engine actor on its place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One engine. number: that of its place, the same after a restart."""

    number: int
    spec: EngineSpec
    engine: Remote[EngineActor]


class EngineFleet:
    """The engines and their state.

    serve: they serve the model that they load, and no weights are pushed.
    fit: whether all hold whole weights; else they must not serve.
    on_change: called by `announce` with the current actors after one was replaced, so that agent workers learn of it.
    state: what of the engines is in device memory; "weights" is half awake, without room to sample.
    lock: held while weights travel or change and while engines fall asleep or wake.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        spawn: SpawnEngine,
        *,
        serve: bool = False,
        reservation: Reservation | None = None,
    ) -> None:
        """reservation: where more engines find places; None: there are never more."""
        self._spawn = spawn
        self._members = [Member(number=i, spec=spec, engine=spawn(i)) for i, spec in enumerate(specs)]
        self._like, self._reservation = specs[0], reservation
        self._serve = serve
        self.fit = serve
        self.replaced = 0
        self.state: Literal["awake", "weights", "asleep"] = "awake"
        self.lock = asyncio.Lock()
        self.on_change: Callable[[Sequence[Remote[EngineActor]]], Awaitable[None]] | None = None
        self._unannounced = False
        self._totals: dict[str, float] = {}
        self._starting = self._start(self._members)

    @property
    def engines(self) -> list[Remote[EngineActor]]:
        return [member.engine for member in self._members]

    @property
    def specs(self) -> list[EngineSpec]:
        return [member.spec for member in self._members]

    @property
    def names(self) -> list[str]:
        return [member.spec.name for member in self._members]

    @property
    def shares_devices(self) -> bool:
        """Whether engines have to sleep while models work (--vllm.enable_sleep)."""
        return self._like.enable_sleep

    def _start(self, members: Sequence[Member]) -> list[ray.ObjectRef[float]]:
        return [member.engine.ask(EngineActor.start, member.spec, serve=self._serve) for member in members]

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
        if not self._like.stats:
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

        Engines on a machine that joined are not replaced: they leave. Raises WorkerDiedError when too many others were
        lost in this run.
        """
        gone = {self._members[i]: why for i, why in (await self.gone(after_push=after_push)).items()}
        if not gone:
            return []
        self.fit = self._serve
        self._unannounced = True
        kept = [member for member in gone if not self._tied(member)]
        self.replaced += len(kept)
        if self.replaced > MAX_REPLACED:
            raise WorkerDiedError(f"{self.replaced} engines were lost, the last one: {first_line(gone[kept[-1]])}")
        for member, why in gone.items():
            what = "starting it again" if member in kept else "the run goes on without it"
            log.warning("%s is gone (%s): %s", member.spec.name, first_line(why), what)
            member.engine.kill()
        self._drop([member for member in gone if member not in kept])
        fresh = {old: replace(old, engine=self._spawn(old.number)) for old in kept}
        self._members = [fresh.get(member, member) for member in self._members]
        names = [member.spec.name for member in kept]
        started = self._start(list(fresh.values()))
        await gather(started, what="engine restart", names=names, timeout=START_TIMEOUT)
        await self._put_to_sleep([member.engine for member in fresh.values()])
        return [member.spec.name for member in gone]

    def _tied(self, member: Member) -> bool:
        return self._reservation is not None and self._reservation.tied(ENGINE, member.number)

    def _drop(self, members: Sequence[Member]) -> None:
        self._members = [member for member in self._members if member not in members]
        for member in members:
            self._release(member.number)

    def _release(self, number: int) -> None:
        if self._reservation is not None:
            self._reservation.release(ENGINE, number)

    async def start_more(self, count: int, *, on: str = "") -> list[Member]:
        """Further engines with their models, which are no part of the fleet yet. on: as in `Reservation.add`.

        Raises NoRoomError, and WorkerDiedError when one does not start; then none is left.
        """
        assert self._reservation is not None, "a run whose engines may join has a reservation"
        taken = {member.number for member in self._members}
        free = (n for n in itertools.count() if n not in taken and not (on and self._reservation.planned(ENGINE, n)))
        numbers = list(itertools.islice(free, count))
        members: list[Member] = []
        try:
            for found, number in enumerate(numbers):
                if not await self._reservation.add(ENGINE, number, on):
                    raise NoRoomError(f"{count} more engines were asked for: {self._reservation.room(ENGINE, found)}")
            for n in numbers:
                spec = replace(self._like, name=f"{ENGINE} {n}", seed=self._like.seed + n)
                members.append(Member(number=n, spec=spec, engine=self._spawn(n)))
            await self._load(members)
        except BaseException:
            self.abandon(members)
            for number in numbers[len(members) :]:
                self._release(number)
            raise
        return members

    async def _load(self, members: Sequence[Member]) -> None:
        """Until new engines have their models. Raises WorkerDiedError, also when the machine of one goes meanwhile."""
        assert self._reservation is not None
        names = [member.spec.name for member in members]
        starting = gather(self._start(members), what="start of new engines", names=names, timeout=START_TIMEOUT)
        loading = asyncio.ensure_future(starting)
        try:
            while not (await asyncio.wait((loading,), timeout=PLACE_INTERVAL))[0]:
                if lost := [m.spec.name for m in members if self._reservation.lost(ENGINE, m.number)]:
                    raise WorkerDiedError(f"start of new engines: the machine of {', '.join(lost)} is gone")
            loading.result()
        finally:
            loading.cancel()

    def abandon(self, members: Sequence[Member]) -> None:
        """End those that did not become part of the fleet, and give their places back."""
        taken = {member.number for member in self._members}
        for member in members:
            if member.number not in taken:
                member.engine.kill()
                self._release(member.number)

    def give_up(self, members: Sequence[Member]) -> None:
        """Take these out again, and what was started in their places."""
        numbers = {member.number for member in members}
        given_up = [member for member in self._members if member.number in numbers]
        self._members = [member for member in self._members if member not in given_up]
        self.abandon(given_up)

    def adopt(self, members: Sequence[Member]) -> None:
        """Engines of `start_more` are part of the fleet from now on. They need a push before they serve."""
        self.fit = self._serve
        self._unannounced = True
        self._members = [*self._members, *members]

    async def dismiss(self, count: int) -> None:
        """Take out the engines that came last: agent workers do without them before they end."""
        leaving = sorted(self._members, key=lambda member: member.number)[-count:]
        self._members = [member for member in self._members if member not in leaving]
        self._unannounced = True
        await self.announce()
        for member in leaving:
            log.info("%s leaves", member.spec.name)
            member.engine.kill()
            self._release(member.number)

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


def spawner(member: str, like: EngineSpec, reservation: Reservation, environment: Mapping[str, str]) -> SpawnEngine:
    """What makes an engine actor of a number on its place. member: of the placement plan. like: any of its engines."""
    actor = engine_actor()

    def spawn(number: int) -> Remote[EngineActor]:
        own = engine_class(like).environment(like)
        given = {name: os.environ[name] for name in own if name in os.environ}
        env = dict(environment) | own | given | reservation.environment(member, number)
        made = actor.options(**reservation.options(member, number), runtime_env=runtime_env(env)).remote()
        return Remote(f"{member} {number}", made)

    return spawn
