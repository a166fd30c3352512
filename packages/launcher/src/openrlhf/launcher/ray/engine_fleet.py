"""All engines of a run: start, restart, weight transfer, and whether they may serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from openrlhf.launcher.ray.calls import WorkerDiedError, gather
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.weights.group import GroupAddress
from openrlhf.rollout.weights.wire import BucketPlan

log = logging.getLogger(__name__)

START_TIMEOUT = 1800.0
PING_TIMEOUT = 15.0

SpawnEngine = Callable[[int], Any]
"""Engine number -> a new, empty engine actor on its place."""


class EngineFleet:
    """The engines and their state. An engine that is unfit holds no valid weights and must not serve.

    on_change: called with the current actors whenever one was replaced, so that agent workers learn of it.
    """

    def __init__(self, specs: Sequence[EngineSpec], spawn: SpawnEngine) -> None:
        self.specs = list(specs)
        self._spawn = spawn
        self.actors: list[Any] = [spawn(i) for i in range(len(specs))]
        self.fit = False
        self.replaced = 0
        self._starting = self._start(range(len(specs)))

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

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

    async def revive(self) -> list[str]:
        """Replace engines that are gone or silent; returns their names. The new ones need a push before they serve."""
        pings = await asyncio.gather(
            *(
                gather([actor.call.remote("health")], what="engine health", names=[name], timeout=PING_TIMEOUT)
                for actor, name in zip(self.actors, self.names, strict=True)
            ),
            return_exceptions=True,
        )
        gone = [i for i, ping in enumerate(pings) if isinstance(ping, BaseException)]
        for i in gone:
            log.warning("%s is gone (%s): starting it again", self.names[i], pings[i])
            ray.kill(self.actors[i])
            self.actors[i] = self._spawn(i)
        if gone:
            self.replaced += len(gone)
            names = [self.names[i] for i in gone]
            await gather(self._start(gone), what="engine restart", names=names, timeout=START_TIMEOUT)
        return [self.names[i] for i in gone]

    async def shutdown(self) -> None:
        """Ask every engine to end, then end it."""
        refs = [actor.call.remote("shutdown") for actor in self.actors]
        try:
            await gather(refs, what="engine shutdown", names=self.names, timeout=20)
        except (WorkerDiedError, RayError) as error:
            log.debug("engine shutdown: %s", error)
        for actor in self.actors:
            ray.kill(actor)
