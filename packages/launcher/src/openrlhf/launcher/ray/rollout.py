"""The trainer's `Rollout` over agent workers: which worker rolls a prompt out, and what happens when one dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.logging.sinks import GeneratedSample
from openrlhf.launcher.ray.calls import WorkerDiedError, first_line, gather, user_error
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.trainer.protocols import EvalRequest, Group

log = logging.getLogger(__name__)

START_TIMEOUT = 600.0
MAX_REPLACED = 20
"""Agent workers that may be lost in one run before it ends: an agent that always kills its worker is a bug."""


class RayRollout:
    """Hands prompts to the agent worker with the fewest running groups.

    A worker that dies or blocks is replaced and its groups are rolled out once more elsewhere. group_timeout bounds one
    group in seconds; decode turns token ids into text.
    """

    def __init__(
        self,
        spawn: Callable[[int], Any],
        fleet: EngineFleet,
        *,
        workers: int,
        group_timeout: float,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._decode = decode
        self._spawn = spawn
        self._fleet = fleet
        self.actors: list[Any] = [spawn(i) for i in range(workers)]
        self._running = [0] * workers
        self._replaced = 0
        self._group_timeout = group_timeout

    async def start(self) -> None:
        """Until every worker has loaded its executor; a broken agent or reward file is reported here."""
        await gather(
            [actor.ready.remote() for actor in self.actors],
            what="agent worker start",
            names=[f"agent worker {i}" for i in range(len(self.actors))],
            timeout=START_TIMEOUT,
        )

    async def engines_changed(self, engines: Sequence[tuple[str, Any]]) -> None:
        """Tell every worker which engine actors serve now."""
        await gather(
            [actor.set_engines.remote(list(engines)) for actor in self.actors],
            what="engine list",
            names=[f"agent worker {i}" for i in range(len(self.actors))],
            timeout=60,
        )

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        for attempt in (1, 2):
            worker = min(range(len(self.actors)), key=lambda i: self._running[i])
            actor = self.actors[worker]
            self._running[worker] += 1
            try:
                return await self._run_on(actor, item, evaluation)
            except (WorkerDiedError, RayActorError) as error:
                if attempt == 2:
                    raise WorkerDiedError(
                        f"agent worker {worker}, group {item.group_id}: {first_line(error)}"
                    ) from error
                await self._replace(worker, actor, first_line(error))
            finally:
                self._running[worker] -= 1
        raise AssertionError("unreachable")

    async def read_samples(self, group: Group, count: int) -> list[GeneratedSample]:
        trajectories = (await group.handle)[:count]
        return [
            GeneratedSample(text=self._decode(t.token_ids), label=str(t.label), reward=t.reward) for t in trajectories
        ]

    async def _run_on(self, actor: Any, item: PromptItem, evaluation: EvalRequest | None) -> Group:
        infos, handle = actor.run_group.options(num_returns=2).remote(item, evaluation)
        try:
            samples = await asyncio.wait_for(asyncio.wrap_future(infos.future()), self._group_timeout)
        except RayTaskError as error:
            raise user_error(error) from error
        except TimeoutError as error:
            raise WorkerDiedError(f"no answer within {self._group_timeout:.0f} s") from error
        return Group(prompt=item, samples=samples, handle=handle)

    async def _replace(self, worker: int, actor: Any, why: str) -> None:
        if self.actors[worker] is not actor:
            return  # another group saw it first
        self._replaced += 1
        if self._replaced > MAX_REPLACED:
            raise WorkerDiedError(f"{self._replaced} agent workers were lost, the last one: {why}")
        log.warning("agent worker %d is gone (%s): starting it again", worker, why)
        ray.kill(actor)
        self.actors[worker] = self._spawn(worker)

    async def shutdown(self) -> None:
        for actor in self.actors:
            actor.shutdown.remote()
        await self._fleet.shutdown()
        for actor in self.actors:
            ray.kill(actor)
