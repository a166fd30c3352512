"""What the controller does for each engine and rank does not grow with their number."""

from __future__ import annotations

from typing import Any

import pytest

from support.simulated_cluster import Meter, SimulatedRun, route

ROOM = 1.1
"""How much more may be done for each of many than for each of eight."""


def whole_and_step(size: int, *, count_work: bool = False, **options: Any) -> dict[str, float]:
    """What a run of two steps and its last step cost, for each engine."""
    run = SimulatedRun(size, steps=2, **options)
    step = run.measure(count_work=count_work)
    whole = vars(run.meter) | {f"{name} of a step": value for name, value in step.items()}
    return {name: value / size for name, value in whole.items() if not name.startswith("seconds")}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_remote_calls_and_bytes_grow_at_most_linearly(backend: str) -> None:
    few = whole_and_step(8, backend=backend)
    for size in (64, 256):
        many = whole_and_step(size, backend=backend)
        assert {name: value for name, value in many.items() if value > ROOM * few[name]} == {}
    assert few["calls of a step"] > 10
    assert few["nbytes of a step"] > 1000


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_controllers_own_work_grows_at_most_linearly(asynchronous: bool) -> None:
    few, many = (whole_and_step(n, asynchronous=asynchronous, count_work=True) for n in (8, 64))
    assert {name: value for name, value in many.items() if value > ROOM * few[name]} == {}
    assert few["work of a step"] > 1000


def test_a_routers_work_grows_at_most_linearly() -> None:
    few, many = Meter(), Meter()
    route(8, meter=few)
    route(128, meter=many)
    assert few.work > 1000
    assert many.work / 128 <= ROOM * few.work / 8
