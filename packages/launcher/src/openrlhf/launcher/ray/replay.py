"""The learner ranks of a replay, on a connected Ray: all of a run's but engines, agent workers and reward model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import ray

from openrlhf.agents.types import Trajectory
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.placement import plan_placement
from openrlhf.launcher.preflight import Prepared
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray.cluster import Cluster
from openrlhf.launcher.ray.devices import extra_noset
from openrlhf.launcher.ray.learner_group import RayLearner
from openrlhf.launcher.ray.placement import Reservation
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.start import ray_learner, start_learners
from openrlhf.launcher.threads import plan_threads


class NoEngines:
    """A push that has nobody to push to."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    def alone(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    async def push(self, policy: RankGroup[PolicyRank], version: int) -> dict[str, float]:
        return {}


async def start_replay_learner(
    config: TrainPPOConfig, recorded: TrainPPOConfig, prepared: Prepared, cluster: Cluster
) -> RayLearner:
    """Start the ranks; return when they are ready.

    recorded: with the engines, beside which the ranks computed: they get as many threads as they had then.
    """
    environment = cluster.worker_environment() | extra_noset(os.environ)
    reservation = Reservation(plan_placement(config, gpus=cluster.gpus, nodes=cluster.nodes, apart=cluster.apart))
    threads = None if cluster.gpus else plan_threads(recorded, cores=cluster.cores, nodes=cluster.nodes)
    groups = start_learners(config, prepared, reservation, environment, threads)
    await asyncio.gather(*(set_up() for _, set_up in groups.values()))
    return ray_learner(config, {role: group for role, (group, _) in groups.items()}, NoEngines())


async def store(trajectories: Sequence[Trajectory]) -> Any:
    """Put them into the object store."""
    return ray.put(list(trajectories))
