"""Engines that join and leave while a run goes on; what a step is trained on and how old it may be does not change.

To join is to be restarted on a place that was not there before: the engine loads its model beside the others, enters a
new weight group with them, gets the weights of then, and only then agent workers hear of it. One that leaves is taken
from the agent workers first, so that what it was doing is done again by the others. Both happen between weight pushes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import replace

import ray

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.placement import engines_share
from openrlhf.launcher.ray.cluster import Cluster
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.placement import NoRoomError
from openrlhf.launcher.ray.weight_push import JoinError, Policy, WeightPush
from openrlhf.launcher.scaling.desk import Desk, Order, RunningRun

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks for orders."""
SHARED = (
    "the engines of this run are on the devices of its models (--train.colocate_all without --train.async_enable), "
    "which take turns with them: their number is fixed. Engines that join and leave have devices of their own"
)


def open_elastic(
    config: TrainPPOConfig, cluster: Cluster, fleet: EngineFleet, push: WeightPush, policy: Policy
) -> Elastic:
    """The desk of a run and who serves it; the run holds its --ckpt.path."""
    about = RunningRun(
        pid=os.getpid(),
        host=socket.gethostname(),
        ray=ray.get_runtime_context().gcs_address,
        token=os.environ.get("RAY_AUTH_TOKEN", "") if os.environ.get("RAY_AUTH_MODE") == "token" else "",
        gpus=cluster.gpus > 0,
        width=config.vllm.tensor_parallel_size if cluster.gpus else 1,
        engines=tuple(fleet.names),
    )
    return Elastic(fleet, push, policy, Desk(config.ckpt.path, about), about, SHARED if engines_share(config) else "")


class Elastic:
    """Does what is asked at the desk of a run.

    refused: why the engines of this run cannot change in number; empty: they can.
    """

    def __init__(
        self, fleet: EngineFleet, push: WeightPush, policy: Policy, desk: Desk, about: RunningRun, refused: str = ""
    ) -> None:
        self._fleet, self._push, self._policy = fleet, push, policy
        self._desk, self._about, self._refused = desk, about, refused

    async def serve(self) -> None:
        """Until it is cancelled. Raises what ends the run: weights that do not arrive at engines that are well."""
        trouble = ""
        try:
            while True:
                try:
                    self._tell()
                    for name, order in self._desk.orders():
                        await self._obey(name, order)
                except OSError as error:  # a disk that is full is no reason to end the run
                    if trouble != (trouble := str(error.strerror)):
                        log.warning("orders about engines can't be read or answered now: %s", error)
                await asyncio.sleep(INTERVAL)
        finally:
            self._desk.close()

    def _tell(self) -> None:
        """Who is there, which also changes without an order."""
        now = replace(self._about, engines=tuple(self._fleet.names))
        if self._about != now:
            self._desk.tell(now)
            self._about = now

    async def _obey(self, name: str, order: Order) -> None:
        log.info("asked for %s", f"{order.more} more engines" if order.on else f"{order.engines} engines")
        have = len(self._fleet.engines)
        try:
            more = self._checked(order)
            members = await self._fleet.start_more(more, on=order.on) if more > 0 else []
        except Exception as error:  # whatever it is, the run goes on as it was
            self._refuse(name, error)
            return
        try:
            if members:
                await self._push.join(self._policy, members)
        except JoinError as error:
            self._refuse(name, error)
            return
        finally:
            self._fleet.abandon(members)
        if more < 0:
            await self._push.part(-more)
        log.info("%d engines became %d: %s", have, len(self._fleet.engines), ", ".join(self._fleet.names))
        self._tell()
        names = self._fleet.names
        self._desk.answer(name, engines=names, joined=[m.spec.name for m in members if m.spec.name in names])

    def _refuse(self, name: str, error: Exception) -> None:
        log.warning("no engines join or leave: %s", error)
        self._desk.answer(name, error=str(error), later=isinstance(error, NoRoomError))

    def _checked(self, order: Order) -> int:
        """How many engines are to join, or less than 0, to leave. Raises ValueError with what is wrong."""
        if self._refused:
            raise ValueError(self._refused)
        wanted = order.more if order.on else order.engines
        if wanted < 1:
            raise ValueError(f"{wanted} engines were asked for: give 1 at least")
        return wanted if order.on else wanted - len(self._fleet.engines)
