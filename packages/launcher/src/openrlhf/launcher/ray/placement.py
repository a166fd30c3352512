"""The pools of a placement plan (`launcher/placement.py`), reserved in Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf.launcher.placement import SHARE, PlacementPlan

RESERVE_TIMEOUT = 600.0


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
