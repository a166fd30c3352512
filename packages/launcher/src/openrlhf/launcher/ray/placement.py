"""Where every actor of a run goes: placement groups on GPUs, one light actor per rank on a CPU.

`plan_placement` is a pure function of the configuration and the number of GPUs; `reserve` asks Ray for what it says.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from openrlhf.launcher.config import PlacementConfig, TrainPPOConfig

log = logging.getLogger(__name__)

RESERVE_TIMEOUT = 600.0
CPU_SHARE = 0.001
"""What a bundle asks of a node's CPUs where no GPU tells the ranks apart: enough to be placed, too little to count."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A placement group to be made: `bundles` resource dicts, packed onto few nodes or spread over all."""

    name: str
    bundles: tuple[dict[str, float], ...]
    strategy: str = "PACK"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One actor's place: bundle number in its pool (None: anywhere) and the resources that it holds."""

    pool: str | None
    bundle: int
    num_gpus: float


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """All pools, and the seats of every role: policy, reference, critic, reward, engine."""

    pools: tuple[Pool, ...]
    seats: dict[str, tuple[Seat, ...]]

    def ranks(self, role: str) -> int:
        return len(self.seats.get(role, ()))


def roles_of(config: TrainPPOConfig) -> dict[str, PlacementConfig]:
    """The learner roles that this run has."""
    roles: dict[str, PlacementConfig] = {"policy": config.actor}
    if config.has_reference:
        roles["reference"] = config.ref
    if config.has_critic:
        roles["critic"] = config.critic
    if config.has_reward_model:
        roles["reward"] = config.reward
    return roles


def plan_placement(config: TrainPPOConfig, *, gpus: int, nodes: int = 1) -> PlacementPlan:
    """Every role its own pool of GPUs; on a CPU no pool on one node, and one bundle per node on several."""
    pools: list[Pool] = []
    seats: dict[str, tuple[Seat, ...]] = {}
    for role, shape in roles_of(config).items():
        seats[role] = _seat_ranks(role, shape, gpus=gpus, pools=pools)
    engines = config.vllm.num_engines or 0
    width = config.vllm.tensor_parallel_size
    if gpus:
        pools.append(Pool(name="engine", bundles=({"GPU": float(width), "CPU": float(width)},) * engines))
        seats["engine"] = tuple(Seat(pool="engine", bundle=i, num_gpus=float(width)) for i in range(engines))
    elif nodes > 1:
        pools.append(Pool(name="engine", bundles=({"CPU": CPU_SHARE},) * engines, strategy="SPREAD"))
        seats["engine"] = tuple(Seat(pool="engine", bundle=i, num_gpus=0) for i in range(engines))
    else:
        seats["engine"] = (Seat(pool=None, bundle=0, num_gpus=0),) * engines
    return PlacementPlan(pools=tuple(pools), seats=seats)


def _seat_ranks(role: str, shape: PlacementConfig, *, gpus: int, pools: list[Pool]) -> tuple[Seat, ...]:
    ranks, per_node = shape.world_size, shape.num_gpus_per_node
    if gpus:
        pools.append(Pool(name=role, bundles=({"GPU": 1.0, "CPU": 1.0},) * ranks))
        return tuple(Seat(pool=role, bundle=i, num_gpus=1.0) for i in range(ranks))
    if shape.num_nodes > 1:
        pools.append(Pool(name=role, bundles=({"CPU": CPU_SHARE},) * shape.num_nodes, strategy="STRICT_SPREAD"))
        return tuple(Seat(pool=role, bundle=i // per_node, num_gpus=0) for i in range(ranks))
    return (Seat(pool=None, bundle=0, num_gpus=0),) * ranks


class Reservation:
    """The pools of a plan, held in Ray."""

    def __init__(self, plan: PlacementPlan) -> None:
        """Reserve all pools. Raises ValueError when Ray has too few resources for them."""
        import ray
        from ray.util.placement_group import placement_group

        self.plan = plan
        self._groups = {pool.name: placement_group(list(pool.bundles), strategy=pool.strategy) for pool in plan.pools}
        waiting = {group.ready(): name for name, group in self._groups.items()}
        missing: list[Any] = []
        if waiting:
            missing = ray.wait(list(waiting), num_returns=len(waiting), timeout=self._patience())[1]
        if missing:
            wanted = {p.name: f"{len(p.bundles)} x {p.bundles[0]}" for p in plan.pools}
            names = ", ".join(sorted(waiting[ref] for ref in missing))
            raise ValueError(
                f"the Ray cluster has no room for {names}: asked for {wanted}, the cluster has "
                f"{ray.cluster_resources()}; use fewer --*.num_gpus_per_node / --vllm.num_engines"
            )

    def _patience(self) -> float:
        """Wait long where the cluster could still free what is asked, shortly where it never had that much."""
        import ray

        have = ray.cluster_resources()
        for kind in ("GPU", "CPU"):
            if sum(b.get(kind, 0.0) for p in self.plan.pools for b in p.bundles) > have.get(kind, 0.0):
                return 5.0
        return RESERVE_TIMEOUT

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Ray's actor options for one seat."""
        seat = self.plan.seats[role][number]
        if seat.pool is None:
            return {"num_cpus": 0}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 1 if seat.num_gpus else 0}
        if seat.num_gpus:
            options["num_gpus"] = seat.num_gpus
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[seat.pool], placement_group_bundle_index=seat.bundle
        )
        return options
