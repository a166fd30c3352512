"""Which actor goes onto which GPU, for every way of sharing them."""

from __future__ import annotations

import asyncio
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.placement import ENGINE, SHARE, PlacementPlan, Seat, plan_placement
from openrlhf.launcher.ray.judges import judge_specs
from openrlhf.launcher.ray.placement import Reservation, node_order
from openrlhf.rollout.engine_spec import EngineSpec

GPU = {"GPU": 1.0, "CPU": 1.0}


def plan(gpus: int = 8, nodes: int = 1, **flags: Any) -> PlacementPlan:
    values = {
        "actor.num_gpus_per_node": 2,
        "ref.num_gpus_per_node": 2,
        "critic.num_gpus_per_node": 2,
        "reward.num_gpus_per_node": 2,
        "vllm.num_engines": 2,
        "reward.model_name_or_path": "R",
        "algo.advantage.estimator": "gae",
        "algo.kl.init_coef": 0.1,
    }
    config = build(TrainPPOConfig(), values | {name.replace("__", "."): value for name, value in flags.items()})
    return plan_placement(config, gpus=gpus, nodes=nodes)


def bundles(p: PlacementPlan) -> dict[str, int]:
    return {pool.name: len(pool.bundles) for pool in p.pools}


def test_every_role_has_gpus_of_its_own() -> None:
    p = plan()
    assert bundles(p) == {"policy": 2, "reference": 2, "critic": 2, "reward": 2, "engine": 2}
    assert all(seat.num_gpus == 1 for seats in p.seats.values() for seat in seats)


def test_roles_that_are_not_needed_are_not_placed() -> None:
    # B027: no coefficient, no reference model
    p = plan(algo__kl__init_coef=0.0)
    assert bundles(p) == {"policy": 2, "critic": 2, "reward": 2, "engine": 2}
    p = plan(algo__advantage__estimator="rloo", reward__model_name_or_path=None, reward__remote_url="f.py")
    assert bundles(p) == {"policy": 2, "reference": 2, "engine": 2}


@pytest.mark.parametrize(
    ("flags", "name"), [("actor", "policy"), ("critic", "critic"), ("ref", "reference"), ("reward", "reward")]
)
def test_nodes_times_gpus_per_node_is_the_number_of_ranks(flags: str, name: str) -> None:
    counts = {f"{flags}.num_nodes": 3, f"{flags}.num_gpus_per_node": 4}
    p = plan(nodes=3, **counts)
    assert bundles(p) == {"policy": 2, "reference": 2, "critic": 2, "reward": 2, "engine": 2} | {name: 12}
    assert [seat.bundle for seat in p.seats[name]] == list(range(12))
    p = plan(gpus=0, nodes=3, **counts)
    (pool,) = (pool for pool in p.pools if pool.name == name)
    assert (len(pool.bundles), pool.strategy) == (3, "STRICT_SPREAD")  # one bundle per node, and four ranks in each
    assert [seat.bundle for seat in p.seats[name]] == [0] * 4 + [1] * 4 + [2] * 4


def test_own_engines_hold_all_gpus_of_their_workers() -> None:
    p = plan(vllm__tensor_parallel_size=4)
    assert p.pools[-1].bundles == ({"GPU": 4.0, "CPU": 4.0},) * 2
    assert p.seats["engine"][1] == Seat(pool="engine", bundle=1, num_gpus=4.0)


def test_colocate_all_puts_one_of_each_on_every_gpu() -> None:
    p = plan(train__colocate_all=True)
    name = "policy+critic+reference+reward+engine"
    assert [(pool.name, pool.bundles) for pool in p.pools] == [(name, (GPU, GPU))]
    for seats in p.seats.values():
        assert seats == tuple(Seat(pool=name, bundle=i, num_gpus=SHARE) for i in range(2))
    for bundle in range(2):
        held = [seat for seats in p.seats.values() for seat in seats if seat.bundle == bundle]
        assert sum(seat.num_gpus for seat in held) <= 1
        assert sum(seat.num_cpus for seat in held) <= 1


def test_wide_engines_get_neighbouring_bundles() -> None:
    p = plan(
        train__colocate_all=True,
        vllm__tensor_parallel_size=2,
        **{f"{role}.num_gpus_per_node": 4 for role in ("actor", "ref", "critic", "reward")},
    )
    seats = p.seats["engine"]
    assert [seat.workers for seat in seats] == [(0, 1), (2, 3)]
    assert [(seat.bundle, seat.num_gpus, seat.num_cpus) for seat in seats] == [(0, 0, 0), (2, 0, 0)]


def test_asynchronous_engines_keep_their_own_gpus() -> None:
    p = plan(train__colocate_all=True, train__async_enable=True)
    assert bundles(p) == {"policy+critic+reference+reward": 2, "engine": 2}
    assert p.seats["engine"][0].num_gpus == 1


def test_pairs() -> None:
    p = plan(train__colocate_actor_ref=True, train__colocate_critic_reward=True)
    assert bundles(p) == {"policy+reference": 2, "critic+reward": 2, "engine": 2}
    assert {p.seats[role][1] for role in ("policy", "reference")} == {
        Seat(pool="policy+reference", bundle=1, num_gpus=SHARE)
    }


@pytest.mark.parametrize("flag", ["train.colocate_all", "train.colocate_actor_ref", "train.colocate_critic_reward"])
def test_there_is_nothing_to_share_on_a_cpu(flag: str) -> None:
    assert plan(gpus=0, **{flag: True}) == plan(gpus=0)
    assert plan(gpus=0).pools == ()


def test_neighbouring_bundles_lie_on_one_node() -> None:
    assert node_order({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 2, 1, 3]


def test_a_judge_has_engines_and_devices_of_its_own() -> None:
    judge: dict[str, Any] = {
        "judge__model_name_or_path": "J",
        "judge__num_engines": 2,
        "judge__tensor_parallel_size": 2,
        "reward__model_name_or_path": None,
        "reward__remote_url": "judge",
    }
    for shared in ({}, {"train__colocate_all": True}):
        p = plan(**judge, **shared)
        assert bundles(p)["judge"] == 2
        (pool,) = (pool for pool in p.pools if pool.name == "judge")
        assert pool.bundles[0] == {"GPU": 2.0, "CPU": 2.0}
        assert p.seats["judge"] == tuple(Seat(pool="judge", bundle=i, num_gpus=2.0) for i in range(2))
        assert "judge" not in plan(**shared).seats
    assert plan(gpus=0, **judge).seats["judge"] == (Seat(pool=None, bundle=0, num_gpus=0),) * 2
    assert bundles(plan(gpus=0, nodes=2, **judge))["judge"] == 2


def test_engines_of_a_judge_load_its_model_and_take_no_pushes() -> None:
    flags = {"judge.model_name_or_path": "J", "judge.num_engines": 2, "judge.max_len": 99, "train.seed": 5}
    config = build(TrainPPOConfig(), flags)
    like = EngineSpec(model="A", dtype="bfloat16", device="cuda", enable_sleep=True, lora_rank=8, max_model_len=7)
    specs = judge_specs(config, like)
    assert [(s.model, s.name, s.max_model_len, s.dtype, s.seed) for s in specs] == [
        ("J", "judge 0", 99, "bfloat16", 5),
        ("J", "judge 1", 99, "bfloat16", 6),
    ]
    assert not any(s.enable_sleep or s.lora_rank for s in specs)
    assert judge_specs(TrainPPOConfig(), like) == []


class Cluster:
    """Ray's placement groups, of which so many fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, **resources: float) -> None:
        self.room, self.asked, self.removed = room, [], []
        self.state = "CREATED"
        groups = importlib.import_module("ray.util.placement_group")  # `ray.util` has a function of this name too
        monkeypatch.setattr(groups, "placement_group", self.make)
        monkeypatch.setattr(groups, "remove_placement_group", self.removed.append)
        monkeypatch.setattr("ray.util.placement_group_table", lambda group: {"state": self.state})
        monkeypatch.setattr("ray.cluster_resources", lambda: resources)
        monkeypatch.setattr("ray.available_resources", lambda: resources)

    def make(self, bundles: list[dict[str, float]]) -> SimpleNamespace:
        self.asked.append(bundles[0])
        return SimpleNamespace(wait=lambda seconds: len(self.asked) - len(self.removed) <= self.room)


def test_places_beyond_the_plan_are_added_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, room=1, CPU=3.0)
    reservation = Reservation(plan(gpus=0))
    assert asyncio.run(reservation.add(ENGINE, 1))  # a seat of the plan, which is never given up
    assert asyncio.run(reservation.add(ENGINE, 2))
    assert not asyncio.run(reservation.add(ENGINE, 3))
    assert cluster.asked == [{"CPU": 1.0}] * 2
    assert (
        reservation.room(ENGINE, 1) == "the cluster has room for 1 (4 CPUs are free, an engine takes 1 on one machine)"
    )
    assert reservation.options(ENGINE, 1) == {"num_cpus": 0}
    options = reservation.options(ENGINE, 2)
    assert (options["num_cpus"], options["num_gpus"]) == (0, 0)
    assert options["scheduling_strategy"].placement_group_bundle_index == 0
    reservation.release(ENGINE, 1)
    reservation.release(ENGINE, 2)
    assert len(cluster.removed) == 2
    with pytest.raises(IndexError):
        reservation.options(ENGINE, 2)


def test_a_place_on_a_machine_that_joined_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, room=5, CPU=3.0)
    reservation = Reservation(plan(gpus=0))
    assert not asyncio.run(reservation.add(ENGINE, 2, "machine"))  # it is not there yet, and Ray is not asked
    assert cluster.asked == []
    cluster = Cluster(monkeypatch, room=5, CPU=3.0, machine=1.0)
    assert asyncio.run(reservation.add(ENGINE, 2, "machine"))
    assert asyncio.run(reservation.add(ENGINE, 3))
    assert cluster.asked == [{"CPU": 1.0, "machine": 0.001}, {"CPU": 1.0}]
    assert [reservation.tied(ENGINE, n) for n in (1, 2, 3)] == [False, True, False]
    cluster.state = "RESCHEDULING"
    assert [reservation.lost(ENGINE, n) for n in (1, 2, 3)] == [False, True, False]


def test_more_engines_on_gpus_hold_as_many_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, room=5, GPU=4.0)
    groups = plan(vllm__tensor_parallel_size=2)
    reservation = Reservation(PlacementPlan(pools=(), seats=groups.seats))
    assert asyncio.run(reservation.add(ENGINE, 2))
    assert cluster.asked == [{"GPU": 2.0, "CPU": 2.0}]
    assert reservation.options(ENGINE, 2)["num_gpus"] == 2
    assert reservation.environment(ENGINE, 2) == {}
    assert (
        reservation.room(ENGINE, 0) == "the cluster has room for 0 (4 GPUs are free, an engine takes 2 on one machine)"
    )
