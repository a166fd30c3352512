"""Bounded calls: what is raised when several workers fail, and that the dead one is named."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError

from openrlhf.launcher.ray import calls
from openrlhf.launcher.ray.calls import WorkerDiedError, gather, unless


async def after(turns: int, outcome: Any) -> Any:
    for _ in range(turns):
        await asyncio.sleep(0)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def run_gather(*outcomes: tuple[int, Any], timeout: float = 5.0) -> list[Any]:
    """Workers that answer after so many turns of the loop; a negative number: never."""

    async def main() -> list[Any]:
        refs: Any = [after(t, o) if t >= 0 else asyncio.sleep(3600) for t, o in outcomes]
        names = [f"policy rank {i}" for i in range(len(outcomes))]
        return await gather(refs, what="policy update", names=names, timeout=timeout)

    return asyncio.run(main())


def test_answers_come_in_order() -> None:
    assert run_gather((3, "a"), (0, "b"), (1, "c")) == ["a", "b", "c"]


def test_a_death_goes_before_the_errors_that_it_causes() -> None:
    broken = RuntimeError("connection closed by peer")
    with pytest.raises(WorkerDiedError, match=r"policy update: policy rank 2 died"):
        run_gather((0, broken), (0, broken), (20, ActorDiedError()))


@pytest.mark.parametrize("death", [OutOfMemoryError("low on memory"), NodeDiedError("gone"), WorkerCrashedError()])
def test_every_kind_of_death_is_named(death: Exception) -> None:
    with pytest.raises(WorkerDiedError, match="policy update: policy rank 1 died"):
        run_gather((0, 1), (2, death))


def test_an_error_of_its_own_is_raised_when_nobody_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "DEATH_NOTICE", 0.02)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_gather((0, RuntimeError("out of memory")), (-1, None))
    with pytest.raises(RuntimeError, match="out of memory"):
        run_gather((0, RuntimeError("out of memory")), (3, "fine"))


def test_a_users_mistake_is_raised_at_once() -> None:
    with pytest.raises(ValueError, match="--actor"):
        run_gather((0, ValueError("--actor.adam.lr must be positive")), (-1, None))


def test_a_silent_worker_is_named() -> None:
    with pytest.raises(WorkerDiedError, match=r"policy update: no answer from policy rank 1 within 0 s"):
        run_gather((0, 1), (-1, None), timeout=0.02)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (asyncio.sleep(3600), "Ray: raylet"),
        (after(3, ValueError("its own error")), "its own error"),
    ],
    ids=["waits on", "ends by itself"],
)
def test_work_that_waits_in_vain_ends_with_what_was_lost(work: Any, message: str) -> None:
    async def lost() -> BaseException:
        return WorkerDiedError("Ray: raylet")

    async def run() -> Any:
        return await unless(lost(), work, notice=0.1)

    with pytest.raises((WorkerDiedError, ValueError), match=message):
        asyncio.run(run())


def test_work_that_ends_is_not_disturbed_and_a_cancel_stays_one() -> None:
    never: Any = asyncio.sleep(3600)

    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        await unless(asyncio.sleep(3600, result=RuntimeError()), asyncio.sleep(3600))

    assert asyncio.run(unless(never, after(3, "done"))) == "done"
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
