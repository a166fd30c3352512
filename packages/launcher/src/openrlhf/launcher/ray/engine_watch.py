"""Looks after all workers of a run: restarts engines, ends silent agent workers and the run when a rank is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from openrlhf.launcher.ray.calls import WorkerDiedError, gather
from openrlhf.launcher.ray.elastic import Elastic
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.learner_actor import WORK_TIMEOUT, LearnerActor
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.rollout import RayRollout

log = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between two looks."""


class EngineWatch:
    """One task over all engines, one over all agent workers, one per learner rank, one over Ray itself.

    What they can't mend ends the run by name.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        recover: Callable[[], Awaitable[None]],
        rollout: RayRollout,
        groups: Sequence[RankGroup[Any]],
        interval: float,
        elastic: Elastic | None = None,
        ended: Callable[[], str] = str,
    ) -> None:
        """recover: starts engines again that are gone, and gives them weights. groups: all learner roles.

        elastic: lets engines join and leave; None: nobody asks. ended: names what has ended of a Ray of our own.
        """
        self._fleet, self._recover, self._rollout = fleet, recover, rollout
        self._groups = groups
        self._interval = interval
        self._elastic = elastic
        self._ended = ended
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Look from now on."""
        self._tasks.append(asyncio.create_task(self._guarded(self._engines()), name="engine watch"))
        self._tasks.append(asyncio.create_task(self._guarded(self._agents()), name="agent watch"))
        self._tasks.append(asyncio.create_task(self._guarded(self._ray()), name="watch of Ray"))
        if self._elastic is not None:
            self._tasks.append(asyncio.create_task(self._guarded(self._elastic.serve()), name="engines on demand"))
        for group in self._groups:
            for rank in group.ranks:
                self._tasks.append(asyncio.create_task(self._guarded(self._rank(rank)), name=f"watch {rank.name}"))

    async def stop(self) -> None:
        """Look no longer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guarded(self, watch: Coroutine[Any, Any, None]) -> None:
        try:
            await watch
        except Exception as error:
            self._rollout.fail(error)

    async def _engines(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def _ray(self) -> None:
        """Actors live on for a while without their node, but none can be started or found again."""
        while not (ended := self._ended()):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(self._interval)
        raise WorkerDiedError(f"Ray: {ended}")

    async def _agents(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._rollout.replace_silent_workers()

    async def look(self) -> None:
        """Restart engines that are gone; let workers use engines again that they gave up but that are well."""
        if await self._fleet.gone():
            await self._recover()
        elif self._fleet.fit and (down := await self._rollout.engines_down()):
            log.info("engines that agent workers gave up serve again: %s", down)
            await self._rollout.engines_changed(self._fleet.engines)

    async def _rank(self, rank: Remote[Any]) -> None:
        """A call waits in the rank's queue as long as it works, and fails at once when it dies."""
        while True:
            await gather([rank.ask(LearnerActor.node)], what="learner watch", names=[rank.name], timeout=WORK_TIMEOUT)
            await asyncio.sleep(self._interval)
