"""Where every actor of a run goes: placement groups on GPUs, one light actor per rank on a CPU.

`plan_placement` is a pure function of the configuration and the number of GPUs; `reserve` asks Ray for what it says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
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


SHARE = 0.2
"""What an actor holds of a GPU and its CPU where several share them: room for four models and an engine."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One actor's place: bundle number in its pool (None: anywhere) and the resources that it holds.

    workers: bundles of the processes that the actor itself starts through Ray, which hold its share of the GPUs.
    """

    pool: str | None
    bundle: int
    num_gpus: float
    workers: tuple[int, ...] = ()

    @property
    def num_cpus(self) -> float:
        """A CPU per GPU, in the same shares."""
        if self.workers:
            return 0
        return min(self.num_gpus, 1)


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


def sharing(config: TrainPPOConfig) -> list[tuple[str, ...]]:
    """Which of the run's roles share GPUs, engines among them in the hybrid engine; a role alone is not listed."""
    train, here = config.train, roles_of(config)
    if train.colocate_all:
        return [(*here, *(() if train.async_enable else ("engine",)))]
    pairs = []
    if train.colocate_actor_ref:
        pairs.append(("policy", "reference"))
    if train.colocate_critic_reward:
        pairs.append(("critic", "reward"))
    return [pair for pair in pairs if all(role in here for role in pair)]


def plan_placement(config: TrainPPOConfig, *, gpus: int, nodes: int = 1) -> PlacementPlan:
    """On GPUs a pool per role or per group of roles that share them.

    On a CPU there is nothing to share: no pool on one node, and one bundle per node on several.
    """
    if gpus:
        return _plan_gpus(config)
    pools: list[Pool] = []
    seats = {role: _seat_cpu_ranks(role, shape, pools) for role, shape in roles_of(config).items()}
    engines = config.vllm.num_engines or 0
    if nodes > 1:
        pools.append(Pool(name="engine", bundles=({"CPU": CPU_SHARE},) * engines, strategy="SPREAD"))
        seats["engine"] = tuple(Seat(pool="engine", bundle=i, num_gpus=0) for i in range(engines))
    else:
        seats["engine"] = (Seat(pool=None, bundle=0, num_gpus=0),) * engines
    return PlacementPlan(pools=tuple(pools), seats=seats)


def _seat_cpu_ranks(role: str, shape: PlacementConfig, pools: list[Pool]) -> tuple[Seat, ...]:
    ranks, per_node = shape.world_size, shape.num_gpus_per_node
    if shape.num_nodes > 1:
        pools.append(Pool(name=role, bundles=({"CPU": CPU_SHARE},) * shape.num_nodes, strategy="STRICT_SPREAD"))
        return tuple(Seat(pool=role, bundle=i // per_node, num_gpus=0) for i in range(ranks))
    return (Seat(pool=None, bundle=0, num_gpus=0),) * ranks


def _plan_gpus(config: TrainPPOConfig) -> PlacementPlan:
    pools: dict[str, Pool] = {}
    seats: dict[str, tuple[Seat, ...]] = {}
    shared = {role: "+".join(group) for group in sharing(config) for role in group}
    for role, shape in roles_of(config).items():
        name = shared.get(role, role)
        pools[name] = Pool(name=name, bundles=({"GPU": 1.0, "CPU": 1.0},) * shape.world_size)
        share = SHARE if role in shared else 1.0
        seats[role] = tuple(Seat(pool=name, bundle=i, num_gpus=share) for i in range(shape.world_size))
    engines, width = config.vllm.num_engines or 0, config.vllm.tensor_parallel_size
    if "engine" not in shared:
        pools["engine"] = Pool(name="engine", bundles=({"GPU": float(width), "CPU": float(width)},) * engines)
        seats["engine"] = tuple(Seat(pool="engine", bundle=i, num_gpus=float(width)) for i in range(engines))
    elif width == 1:
        seats["engine"] = tuple(Seat(pool=shared["engine"], bundle=i, num_gpus=SHARE) for i in range(engines))
    else:
        seats["engine"] = tuple(
            Seat(pool=shared["engine"], bundle=i * width, num_gpus=0, workers=tuple(range(i * width, (i + 1) * width)))
            for i in range(engines)
        )
    return PlacementPlan(pools=tuple(pools.values()), seats=seats)


class Reservation:
    """The pools of a plan, held in Ray."""

    def __init__(self, plan: PlacementPlan) -> None:
        """Reserve all pools. Raises ValueError when Ray has too few resources for them."""
        import ray
        from ray.util.placement_group import placement_group

        self.plan = plan
        self._order: dict[str, list[int]] = {}
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

        options: dict[str, Any] = {"num_cpus": seat.num_cpus}
        if seat.num_gpus:
            options["num_gpus"] = seat.num_gpus
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[seat.pool],
            placement_group_bundle_index=self._bundle(seat.pool, seat.bundle),
            placement_group_capture_child_tasks=bool(seat.workers),
        )
        return options

    def environment(self, role: str, number: int) -> dict[str, str]:
        """Where the processes go that an actor starts itself: what vLLM's Ray executor reads."""
        seat = self.plan.seats[role][number]
        if not seat.workers or seat.pool is None:
            return {}
        bundles = [self._bundle(seat.pool, bundle) for bundle in seat.workers]
        return {
            "VLLM_RAY_PER_WORKER_GPUS": str(SHARE),
            "VLLM_RAY_BUNDLE_INDICES": ",".join(str(bundle) for bundle in bundles),
        }

    def _bundle(self, pool: str, number: int) -> int:
        """Ray numbers bundles in no order of nodes; here neighbours lie on one node."""
        if pool not in self._order:
            from ray.util import placement_group_table

            nodes = placement_group_table(self._groups[pool])["bundles_to_node_id"]
            self._order[pool] = node_order(nodes)
        return self._order[pool][number]


def node_order(nodes: Mapping[int, str]) -> list[int]:
    """Bundle numbers node by node, in the order in which the nodes first appear."""
    first: dict[str, int] = {}
    for bundle in sorted(nodes):
        first.setdefault(nodes[bundle], bundle)
    return sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))
