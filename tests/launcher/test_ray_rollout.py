"""The rollout over fake agent workers: dead workers are replaced, a dead learner rank ends the run by name."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, WorkerCrashedError

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.ray import engine_watch, rollout, start
from openrlhf.launcher.ray.calls import WorkerDiedError
from openrlhf.launcher.ray.engine_watch import EngineWatch
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.rollout import RayRollout
from openrlhf.launcher.samples import Group
from support.trainer_fakes import GOOD

ITEM = PromptItem(group_id="e0-p0", prompt="p", position=0, episode=0)


class Worker:
    """An agent worker. outcome: its samples, an error, or None: no answer."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.run_group = self
        self.engines_down = SimpleNamespace(remote=self.sign_of_life)

    async def sign_of_life(self) -> dict[str, str]:
        if self.outcome is None:
            await asyncio.sleep(3600)
        return {}

    def options(self, **_: Any) -> Worker:
        return self

    def remote(self, item: PromptItem, evaluation: Any, parent: str | None) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if isinstance(self.outcome, Exception):
            future.set_exception(self.outcome)
        elif self.outcome is not None:
            future.set_result(self.outcome)
        return SimpleNamespace(future=lambda: future), "handle"


def make(
    outcomes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    timeout: float = 30,
    spawn: Callable[[int], Worker] | None = None,
) -> RayRollout:
    monkeypatch.setattr("ray.kill", lambda actor: None)
    workers = iter(map(Worker, outcomes))
    start = spawn or (lambda number: next(workers))
    fleet: Any = None
    monkeypatch.setattr("ray.put", list)
    return RayRollout(
        lambda number: Remote(f"agent worker {number}", start(number)),
        fleet,
        workers=1,
        group_timeout=timeout,
        silence=0.05,
        decode=str,
        n_samples=2,
        max_len=64,
    )


class Starter:
    """What `ray.remote` makes of an actor class: remembers the numbers of the actors that it started."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def options(self, **_: Any) -> Starter:
        return self

    def remote(self, spec: Any, engines: Any, number: int) -> str:
        self.started.append(number)
        return f"worker {number}"


@pytest.mark.parametrize("count", [1, 3])
def test_num_workers_is_how_many_agent_workers_start(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    starter, config = Starter(), build(TrainPPOConfig(), {"agent.num_workers": count})
    monkeypatch.setattr("ray.remote", lambda actor: starter)
    monkeypatch.setattr("ray.put", lambda spec: spec)
    monkeypatch.setattr(start, "agent_spec", lambda config, prepared: None)
    fleet: Any = SimpleNamespace(engines=["engine"])
    prepared: Any = SimpleNamespace(tokenizer=SimpleNamespace(decode=str))

    async def main() -> list[Any]:
        return start.start_rollout(config, prepared, fleet, {}).workers

    assert asyncio.run(main()) == [Remote(f"agent worker {i}", f"worker {i}") for i in range(count)]
    assert starter.started == list(range(count))


@pytest.mark.parametrize("death", [ActorDiedError(), OutOfMemoryError("low on memory"), WorkerCrashedError()])
def test_a_group_of_a_dead_worker_is_rolled_out_by_another(death: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Any:
        return await make([death, [GOOD]], monkeypatch).run_group(ITEM)

    group = asyncio.run(main())
    assert (group.samples, group.handle) == ([GOOD], "handle")


def test_a_group_that_always_kills_its_worker_fails_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[Any]:
        parts = make([ActorDiedError(), ActorDiedError(), ActorDiedError(), [GOOD]], monkeypatch)
        return [await parts.run_group(ITEM), await parts.run_group(ITEM)]

    lost, later = asyncio.run(main())
    assert [s.failed for s in lost.samples] == [True, True]
    assert "group e0-p0 was lost with 3 agent workers" in lost.samples[0].failure
    assert [t.failed for t in lost.handle] == [True, True]
    assert later.samples == [GOOD]


class SharedWorker(Worker):
    """Dies with everything in it a while after a bad prompt came; other prompts take longer than that."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__([GOOD])
        self.bad = bad
        self.inside: list[concurrent.futures.Future[Any]] = []

    def remote(self, item: PromptItem, evaluation: Any, parent: str | None) -> Any:
        loop = asyncio.get_running_loop()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.inside.append(future)
        if item.position in self.bad:
            loop.call_later(0.002, self.die)
        else:
            loop.call_later(0.01, lambda: future.done() or future.set_result([GOOD]))
        return SimpleNamespace(future=lambda: future), f"handle {item.position}"

    def die(self) -> None:
        for future in self.inside:
            if not future.done():
                future.set_exception(ActorDiedError())


@pytest.mark.parametrize("bad", [set(), {3}, {0, 7}])
def test_only_the_groups_that_block_their_worker_fail(bad: set[int], monkeypatch: pytest.MonkeyPatch) -> None:  # B135
    items = [PromptItem(group_id=f"e0-p{p}", prompt="p", position=p, episode=0) for p in range(12)]

    async def main() -> list[Group]:
        parts = make([], monkeypatch, spawn=lambda number: SharedWorker(bad))
        return await asyncio.gather(*(parts.run_group(item) for item in items))

    groups = asyncio.run(asyncio.wait_for(main(), 10))
    assert {g.position for g in groups if g.samples[0].failed} == bad


def test_workers_that_always_die_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        parts = make([], monkeypatch, spawn=lambda number: Worker(ActorDiedError()))
        for _ in range(20):
            await parts.run_group(ITEM)

    with pytest.raises(WorkerDiedError, match="21 agent workers were lost in a row"):
        asyncio.run(main())


class QueueingWorker(Worker):
    """Finishes its groups one after the other, as they come out of the queue before a reward function."""

    def __init__(self, seconds: float) -> None:
        super().__init__([GOOD])
        self.seconds = seconds
        self.free = 0.0

    def remote(self, item: PromptItem, evaluation: Any, parent: str | None) -> Any:
        loop = asyncio.get_running_loop()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.free = max(self.free, loop.time()) + self.seconds
        loop.call_at(self.free, future.set_result, [GOOD])
        return SimpleNamespace(future=lambda: future), "handle"


def test_n14_the_bound_of_a_group_does_not_include_its_wait_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of 10 groups takes twice the bound, in a worker that finishes one all the time."""
    started = []

    async def main() -> list[Group]:
        parts = make([], monkeypatch, timeout=1.0, spawn=lambda number: started.append(1) or QueueingWorker(0.2))
        return await asyncio.gather(*(parts.run_group(ITEM) for _ in range(10)))

    assert [group.samples for group in asyncio.run(main())] == [[GOOD]] * 10
    assert len(started) == 1


def test_a_silent_worker_is_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> Any:
        return await make([None, [GOOD]], monkeypatch, timeout=0.01).run_group(ITEM)

    assert asyncio.run(main()).samples == [GOOD]
    assert "agent worker 0 is gone (no answer within 0 s)" in caplog.text


def test_a_worker_that_holds_its_interpreter_is_found_by_its_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[Any]:
        parts = make([None, [GOOD]], monkeypatch)
        seen = [parts.workers[0]]
        await parts.replace_silent_workers()
        await parts.replace_silent_workers()
        return [*seen, parts.workers[0], await parts.run_group(ITEM)]

    silent, worker, group = asyncio.run(main())
    assert worker is not silent
    assert group.samples == [GOOD]
    assert caplog.text.count("sign of life: no answer from agent worker 0 within 0 s") == 1


def test_samples_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(rollout, "FETCH_TIMEOUT", 0.02)
        await make([[GOOD]], monkeypatch).fetch(Group(prompt=ITEM, samples=[], handle=asyncio.sleep(3600)))

    with pytest.raises(WorkerDiedError, match="samples: no answer from the store of group e0-p0"):
        asyncio.run(main())


def test_a_dead_learner_rank_ends_groups_that_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gather(refs: Any, *, what: str, names: Any, timeout: float) -> Any:
        raise WorkerDiedError(f"{what}: {names[0]} died")

    async def main() -> None:
        monkeypatch.setattr(engine_watch, "gather", gather)
        parts = make([None], monkeypatch)
        rank = SimpleNamespace(node=SimpleNamespace(remote=lambda: None))
        group: Any = SimpleNamespace(ranks=[Remote("policy rank 0", rank)])
        none: Any = None
        watch = EngineWatch(none, none, parts, [group], 100.0)
        watch.start()
        try:
            await asyncio.wait_for(parts.run_group(ITEM), 5)
        finally:
            await watch.stop()

    with pytest.raises(WorkerDiedError, match="learner watch: policy rank 0 died"):
        asyncio.run(main())


def test_reward_counts_of_all_workers_since_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up; in a span in which a worker was lost, whose counts begin anew, nothing is told."""
    told = iter([{"a/calls": 2.0, "a/samples": 8.0, "a/seconds": 4.0}, {"a/calls": 5.0, "a/samples": 20.0}, {}])

    async def engines() -> dict[str, float]:
        return {"engine/x": 1.0}

    async def main() -> list[dict[str, float]]:
        parts = make([[GOOD]], monkeypatch)
        counts: Any = SimpleNamespace(remote=lambda: answer(next(told)))
        parts.workers[0].actor.reward_totals = counts
        fleet: Any = SimpleNamespace(metrics=engines)
        parts._fleet = fleet
        without = await parts.worker_metrics()
        parts.has_rewards = True
        return [without, *[await parts.worker_metrics() for _ in range(3)]]

    async def answer(totals: dict[str, float]) -> dict[str, float]:
        return totals

    x = {"engine/x": 1.0}
    without, first, second, lost = asyncio.run(main())
    assert without == lost == x
    assert first == x | {"reward/a/calls": 2.0, "reward/a/seconds": 2.0}
    assert second == x | {"reward/a/calls": 3.0}
