"""What the engines measure becomes means and rates of a step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.ray import engine_fleet
from openrlhf.launcher.ray.engine_fleet import EngineFleet, engine_metrics
from openrlhf.rollout.engine import EngineHealth
from openrlhf.rollout.engine_spec import EngineSpec
from support.trainer_fakes import fake_run

FIRST = {
    "iterations": 10.0,
    "kv_cache_usage": 2.0,
    "running": 40.0,
    "waiting": 5.0,
    "prefix_queries": 100.0,
    "prefix_hits": 25.0,
    "generated": 30.0,
    "preempted": 1.0,
}


def test_means_and_rates() -> None:
    assert engine_metrics(FIRST) == {
        "engine/kv_cache_usage": 0.2,
        "engine/running_requests": 4.0,
        "engine/waiting_requests": 0.5,
        "engine/prefix_cache_hit_rate": 0.25,
        "engine/preempted_requests": 1.0,
    }
    assert engine_metrics({}) == {}
    assert engine_metrics(FIRST | {"generated": -3.0}) == {}  # an engine was replaced
    assert engine_metrics(FIRST | {"iterations": 0.0}) == {}
    assert "engine/prefix_cache_hit_rate" not in engine_metrics(FIRST | {"prefix_queries": 0.0})


def fleet(*, stats: bool) -> Any:
    return SimpleNamespace(_like=EngineSpec(model="m", stats=stats), engines=[0, 1], _totals={})


def test_a_step_is_the_difference_of_two_readings_over_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([FIRST, FIRST, {n: 2 * v for n, v in FIRST.items()}, {n: 3 * v for n, v in FIRST.items()}])

    async def ask(engines: Any, *_: Any) -> list[EngineHealth]:
        return [EngineHealth(version=0, running=0, paused=False, unfit="", totals=next(readings)) for _ in engines]

    monkeypatch.setattr(engine_fleet, "ask_living", ask)
    own = fleet(stats=True)
    assert asyncio.run(EngineFleet.metrics(own)) == engine_metrics(FIRST) | {"engine/preempted_requests": 2.0}
    assert asyncio.run(EngineFleet.metrics(own)) == engine_metrics(FIRST) | {"engine/preempted_requests": 3.0}


def test_nobody_is_asked_unasked() -> None:
    assert asyncio.run(EngineFleet.metrics(fleet(stats=False))) == {}


def test_a_run_logs_them_and_what_waits() -> None:
    run = fake_run(4, train__async_enable=True)
    run.run()
    assert "engine/running_requests" in run.sink.steps[0]
    assert run.sink.steps[0]["rollout/waiting_batches"] >= 0
