"""The pools of a placement plan (`launcher/placement.py`), reserved in Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openrlhf.launcher.placement import NODE_SHARE, SHARE, PlacementPlan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

RESERVE_TIMEOUT = 600.0
ADD_SECONDS = 10
"""How long a place is looked for that a running run asks for: what is free is there at once."""


class NoRoomError(ValueError):
    """The cluster holds no further engine, at this moment."""


class Reservation:
    """The pools of a plan, held in Ray."""

    def __init__(self, plan: PlacementPlan) -> None:
        """Reserve all pools. Raises ValueError when Ray has too few resources for them."""
        import ray
        from ray.util.placement_group import placement_group

        self.plan = plan
        self._added: dict[tuple[str, int], tuple[PlacementGroup, bool]] = {}
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
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if (role, number) in self._added:
            first = self.plan.seats[role][0]
            place = PlacementGroupSchedulingStrategy(
                placement_group=self._added[role, number][0], placement_group_bundle_index=0
            )
            return {"num_cpus": first.num_cpus, "num_gpus": first.num_gpus, "scheduling_strategy": place}
        seat = self.plan.seats[role][number]
        if seat.pool is None:
            return {"num_cpus": 0, **({"resources": {seat.nodes: NODE_SHARE}} if seat.nodes else {})}
        options: dict[str, Any] = {"num_cpus": seat.num_cpus}
        if seat.num_gpus:
            options["num_gpus"] = seat.num_gpus
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[seat.pool],
            placement_group_bundle_index=self._bundle(seat.pool, seat.bundle),
            placement_group_capture_child_tasks=bool(seat.workers),
        )
        return options

    async def add(self, role: str, number: int, on: str = "") -> bool:
        """A place beyond those of the plan: the GPUs of a seat, or a core; False where the cluster has no room for it.

        on: the Ray resource of a machine that joined the run, on which it is to lie, and with which it goes. A seat of
        the plan that its actor left is still held.
        """
        import ray
        from ray.util.placement_group import placement_group

        if self.planned(role, number):
            return True
        if on and on not in ray.cluster_resources():
            return False
        gpus = self.plan.seats[role][0].num_gpus
        bundle = {"GPU": gpus, "CPU": gpus} if gpus else {"CPU": 1.0}
        group = placement_group([bundle | ({on: 0.001} if on else self.plan.part_of(role))])
        self._added[role, number] = group, bool(on)
        if not await asyncio.to_thread(group.wait, ADD_SECONDS):
            self.release(role, number)
            return False
        return True

    def planned(self, role: str, number: int) -> bool:
        """Whether the plan has a seat for it."""
        return number < self.plan.ranks(role)

    def room(self, role: str, more: int) -> str:
        """What is free, in words. more: places beyond those of now that were found."""
        import ray

        free, width = ray.available_resources(), self.plan.seats[role][0].num_gpus
        kind, each = ("GPU", width) if width else ("CPU", 1.0)
        count = free.get(kind, 0.0) + more * each
        return f"the cluster has room for {more} ({count:g} {kind}s are free, an engine takes {each:g} on one machine)"

    def release(self, role: str, number: int) -> None:
        """Give a place back that was added; seats of the plan stay."""
        from ray.util.placement_group import remove_placement_group

        if (role, number) in self._added:
            remove_placement_group(self._added.pop((role, number))[0])

    def tied(self, role: str, number: int) -> bool:
        """Whether the place is on a machine that joined, and goes with it."""
        return self._added.get((role, number), (None, False))[1]

    def lost(self, role: str, number: int) -> bool:
        """Whether that machine is gone. For all other places Ray looks for another one."""
        from ray.util import placement_group_table

        return self.tied(role, number) and placement_group_table(self._added[role, number][0])["state"] != "CREATED"

    def environment(self, role: str, number: int) -> dict[str, str]:
        """Where the processes go that an actor starts itself: what vLLM's Ray executor reads."""
        seat = self.plan.seats[role][0 if (role, number) in self._added else number]
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
