"""All engines of a run: start, restart, weight transfer, and whether they may serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from openrlhf.launcher.ray.calls import WorkerDiedError, first_line, gather
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.weights.group import GroupAddress
from openrlhf.rollout.weights.wire import BucketPlan

log = logging.getLogger(__name__)

START_TIMEOUT = 1800.0
PING_TIMEOUT = 75.0
"""Longer than an engine's own bound for a sign of life: its core answers between two model steps only."""
MAX_REPLACED = 20
"""Engines that may be lost in one run before it ends: engines that always die are no accident."""

SpawnEngine = Callable[[int], Any]
"""Engine number -> a new, empty engine actor on its place."""


class EngineFleet:
    """The engines and their state. An engine that is unfit holds no valid weights and must not serve.

    on_change: called by `announce` with the current actors after one was replaced, so that agent workers learn of it.
    state: what of the engines is in device memory; "weights" is half awake, without room to sample.
    lock: held while weights travel or change and while engines fall asleep or wake.
    """

    def __init__(self, specs: Sequence[EngineSpec], spawn: SpawnEngine) -> None:
        self.specs = list(specs)
        self._spawn = spawn
        self.actors: list[Any] = [spawn(i) for i in range(len(specs))]
        self.fit = False
        self.replaced = 0
        self.state: Literal["awake", "weights", "asleep"] = "awake"
        self.lock = asyncio.Lock()
        self.on_change: Callable[[Sequence[tuple[str, Any]]], Awaitable[None]] | None = None
        self._unannounced = False
        self._starting = self._start(range(len(specs)))

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def engines(self) -> list[tuple[str, Any]]:
        """Names and actors of now."""
        return list(zip(self.names, self.actors, strict=True))

    @property
    def shares_devices(self) -> bool:
        """Whether engines have to sleep while models work (--vllm.enable_sleep)."""
        return self.specs[0].enable_sleep

    @property
    def num_workers(self) -> int:
        """Ranks of all engines in the weight group."""
        return sum(spec.num_workers for spec in self.specs)

    def _start(self, numbers: Sequence[int]) -> list[ray.ObjectRef]:
        return [self.actors[i].start.remote(self.specs[i]) for i in numbers]

    async def wait_started(self) -> None:
        """Until every engine has its model. Raises WorkerDiedError with the engine's name."""
        await gather(self._starting, what="engine start", names=self.names, timeout=START_TIMEOUT)

    async def _on_all(self, what: str, timeout: float, method: str, argument_lists: Sequence[tuple]) -> list[Any]:
        refs = [
            actor.call.remote(method, *arguments) for actor, arguments in zip(self.actors, argument_lists, strict=True)
        ]
        return await gather(refs, what=what, names=self.names, timeout=timeout)

    async def on_each(self, what: str, method: str, *args: Any, timeout: float = 600.0) -> list[Any]:
        """The same call on every engine."""
        return await self._on_all(what, timeout, method, [args] * len(self.actors))

    async def _on_living(self, what: str, method: str, *args: Any) -> None:
        """The same call on every engine that lives; the dead are started again by the watch or the next push."""
        calls = (
            gather([actor.call.remote(method, *args)], what=what, names=[name], timeout=600.0)
            for name, actor in self.engines
        )
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, WorkerDiedError):
                log.warning("%s", answer)
            elif isinstance(answer, BaseException):
                raise answer

    async def pause(self, *, clear_cache: bool) -> None:
        """Freeze running requests until `resume`. clear_cache: compute their KV cache again then."""
        refs = [actor.call.remote("pause", "keep", clear_cache=clear_cache) for actor in self.actors]
        await gather(refs, what="engine pause", names=self.names, timeout=600)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.on_each("engine resume", "resume")

    async def sleep(self) -> None:
        """Free the engines' device memory: weights go to host memory, the KV cache is dropped."""
        if self.state != "asleep":
            log.info("engines sleep")
            await self._on_living("engine sleep", "sleep")
            self.state = "asleep"

    async def wake_weights(self) -> None:
        """The first half of waking: enough to take weights."""
        if self.state == "asleep":
            log.info("engines wake: weights")
            await self._on_living("engine wake-up", "wake", ["weights"])
            self.state = "weights"

    async def wake_cache(self) -> None:
        """The second half of waking: room to sample."""
        if self.state == "weights":
            log.info("engines wake: KV cache")
            await self._on_living("engine wake-up", "wake", ["kv_cache"])
            self.state = "awake"

    async def join_weight_group(self, address: GroupAddress, *, timeout: float) -> None:
        offset, arguments = 1, []
        for spec in self.specs:
            arguments.append((address.for_engine(offset),))
            offset += spec.num_workers
        await self._on_all("weight group", timeout, "init_weight_transfer", arguments)

    async def receive_weights(self, plan: BucketPlan, version: int, *, timeout: float) -> None:
        await self.on_each(f"weight push {version}", "receive_weights", plan, version, timeout=timeout)

    async def score(self, rows: Sequence[Sequence[int]], *, timeout: float) -> dict[str, list[list[float]]]:
        refs = [actor.score.remote(rows) for actor in self.actors]
        return dict(
            zip(self.names, await gather(refs, what="sync check", names=self.names, timeout=timeout), strict=True)
        )

    def mark_unfit(self) -> None:
        """After a failed push no engine is known to hold whole weights."""
        self.fit = False

    def mark_fit(self) -> None:
        self.fit = True

    async def gone(self, *, after_push: bool = False) -> dict[int, BaseException]:
        """Numbers of the engines that are dead or silent, with what was seen of them.

        after_push: a push has failed; engines that do not come out of it count as gone.
        """
        method = "give_up_push" if after_push else "health"
        pings = await asyncio.gather(
            *(
                gather([actor.call.remote(method)], what="engine health", names=[name], timeout=PING_TIMEOUT)
                for name, actor in self.engines
            ),
            return_exceptions=True,
        )
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
        self.mark_unfit()
        self._unannounced = True
        for i, why in gone.items():
            log.warning("%s is gone (%s): starting it again", self.names[i], first_line(why))
            ray.kill(self.actors[i])
            self.actors[i] = self._spawn(i)
        await gather(self._start(list(gone)), what="engine restart", names=names, timeout=START_TIMEOUT)
        await self._put_to_sleep([self.actors[i] for i in gone], names)
        return names

    async def _put_to_sleep(self, actors: Sequence[Any], names: Sequence[str]) -> None:
        """Bring new engines into the state of the others."""
        steps = {"awake": [], "weights": [("sleep", ()), ("wake", (["weights"],))], "asleep": [("sleep", ())]}
        for method, args in steps[self.state]:
            refs = [actor.call.remote(method, *args) for actor in actors]
            await gather(refs, what=f"engine {method}", names=names, timeout=600)

    async def announce(self) -> None:
        """Tell the agent workers of replaced engines, which hold the current weights by now."""
        if self._unannounced and self.on_change is not None:
            await self.on_change(self.engines)
            self._unannounced = False

    async def shutdown(self) -> None:
        """Ask every engine to end, then end it."""
        refs = [actor.shutdown.remote() for actor in self.actors]
        try:
            await gather(refs, what="engine shutdown", names=self.names, timeout=20)
        except (WorkerDiedError, RayError) as error:
            log.debug("engine shutdown: %s", error)
        for actor in self.actors:
            ray.kill(actor)
