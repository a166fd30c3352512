"""Engines that join and leave, over fake engines and ranks: the order of calls, what is refused, what stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.ray import elastic, engine_fleet
from openrlhf.launcher.ray.calls import WorkerDiedError
from openrlhf.launcher.ray.elastic import SHARED, Elastic
from openrlhf.launcher.scaling import desk
from openrlhf.launcher.scaling.desk import Desk, NotYetError, Order, RunningRun, ask, find_desk
from support import push_fakes
from support.push_fakes import FakeEngine, World

ABOUT = RunningRun(pid=1, host="h", ray="10.0.0.1:6379", token="secret", gpus=False, width=1)


class Places:
    """A cluster with room for `free` engines beyond the two of the plan."""

    def __init__(self, free: int = 2) -> None:
        self.free = free
        self.added: dict[int, str] = {}
        self.machines_gone = False

    async def add(self, role: str, number: int, on: str = "") -> bool:
        if self.planned(role, number):
            return True
        if len(self.added) == self.free:
            return False
        self.added[number] = on
        return True

    def planned(self, role: str, number: int) -> bool:
        return number < 2

    def release(self, role: str, number: int) -> None:
        self.added.pop(number, None)

    def tied(self, role: str, number: int) -> bool:
        return bool(self.added.get(number))

    def lost(self, role: str, number: int) -> bool:
        return self.tied(role, number) and self.machines_gone

    def room(self, role: str, more: int) -> str:
        return f"room for {more}"


class Ordered:
    """A run that has pushed once, and its desk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, *, refused: str = "", free: int = 2) -> None:
        monkeypatch.setattr(elastic, "INTERVAL", 0.01)
        monkeypatch.setattr(engine_fleet, "PLACE_INTERVAL", 0.01)
        monkeypatch.setattr(desk, "POLL", 0.01)
        self.places = Places(free)
        self.world = World(monkeypatch, reservation=self.places)
        self.desk = Desk(path, ABOUT)
        self.elastic = Elastic(self.world.fleet, self.world.push, self.world.policy, self.desk, ABOUT, refused)

    async def served(self, *orders: Order) -> list[Any]:
        """The answers to the orders, one after the other."""
        await self.world.fleet.wait_started()
        await self.world.push.push(self.world.policy, 7)
        self.world.log.clear()
        serving = asyncio.create_task(self.elastic.serve())
        try:
            return [await asyncio.to_thread(self.ask, order) for order in orders]
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    def ask(self, order: Order) -> Any:
        """The answer, or the error in its place."""
        try:
            return ask(self.desk.place, order, timeout=10)
        except ValueError as error:
            return error


def test_engines_that_join_have_the_weights_before_agent_workers_know_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> tuple[World, Any]:
        run = Ordered(monkeypatch, tmp_path)
        told: list[list[str]] = []

        async def on_change(engines: Any) -> None:
            run.world.log.append("announced")
            told.append([engine.name for engine in engines])

        run.world.fleet.on_change = on_change
        answers = await run.served(Order(engines=3))
        assert told == [["engine 0", "engine 1", "engine 2"]]
        assert [spec.seed for spec in run.world.fleet.specs][2] == 2
        return run.world, answers

    world, answers = asyncio.run(main())
    assert answers == [{"engines": ["engine 0", "engine 1", "engine 2"], "joined": ["engine 2"]}]
    own = [entry for entry in world.log if not entry.startswith(("e0", "e1"))]
    assert own == [
        "e2 start",
        "e2 pause False",
        "open_weight_group",
        "e2 init_weight_transfer",
        "push 7",
        "e2 receive_weights",
        "e2 resume",
        "e2 score",
        "announced",
    ]
    assert {"e0 receive_weights", "e1 receive_weights"} <= set(world.log)


def test_engines_leave_agent_workers_before_they_end_and_the_rest_meets_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> list[str]:
        run = Ordered(monkeypatch, tmp_path)

        async def on_change(engines: Any) -> None:
            run.world.log.append(f"announced {len(engines)}")

        run.world.fleet.on_change = on_change
        assert (await run.served(Order(engines=1)))[0]["engines"] == ["engine 0"]
        await run.world.push.push(run.world.policy, 8)
        return run.world.log

    log = asyncio.run(main())
    assert log[:4] == ["announced 1", "e1 killed", "open_weight_group", "e0 init_weight_transfer"]
    assert "e0 receive_weights" in log
    assert not any(entry.startswith("e1 ") for entry in log[2:])


def test_what_is_asked_during_a_push_is_done_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def main() -> None:
        run = Ordered(monkeypatch, tmp_path)
        await run.world.fleet.wait_started()
        serving = asyncio.create_task(run.elastic.serve())
        async with run.world.push.lock:
            asking = asyncio.create_task(asyncio.to_thread(run.ask, Order(engines=1)))
            await asyncio.sleep(0.2)
            assert len(run.world.fleet.engines) == 2
            assert not asking.done()
        assert (await asking)["engines"] == ["engine 0"]
        serving.cancel()

    asyncio.run(main())


def test_numbers_of_engines_that_left_are_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_of: list[Ordered] = []

    async def main() -> list[Any]:
        run_of.append(Ordered(monkeypatch, tmp_path))
        return await run_of[0].served(Order(engines=4), Order(engines=1), Order(engines=3))

    answers = asyncio.run(main())
    assert [a["joined"] for a in answers] == [["engine 2", "engine 3"], [], ["engine 1", "engine 2"]]
    assert run_of[0].places.added == {2: ""}


@pytest.mark.parametrize(
    ("order", "refused", "why"),
    [
        (Order(engines=5), "", "3 more engines were asked for: room for 2"),
        (Order(engines=0), "", "0 engines were asked for: give 1 at least"),
        (Order(more=-1, on="m"), "", "-1 engines were asked for: give 1 at least"),
        (Order(engines=3), SHARED, "--train.colocate_all without --train.async_enable"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    order: Order, refused: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> tuple[Ordered, Any]:
        run = Ordered(monkeypatch, tmp_path, refused=refused)
        return run, (await run.served(order))[0]

    run, answer = asyncio.run(main())
    assert why in str(answer)
    assert isinstance(answer, NotYetError) is (order.engines == 5)
    assert run.world.log == []
    assert run.places.added == {}
    assert run.world.fleet.names == ["engine 0", "engine 1"]


def test_engines_that_do_not_start_leave_the_run_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def gather(refs: Any, *, what: str, names: Any, timeout: float) -> Any:
        if what == "start of new engines":
            for ref in refs:
                ref.close()
            raise WorkerDiedError(f"{what}: {names[0]} died")
        return list(await asyncio.gather(*refs))

    async def main() -> tuple[Ordered, Any]:
        run = Ordered(monkeypatch, tmp_path)
        monkeypatch.setattr(engine_fleet, "gather", gather)
        return run, (await run.served(Order(engines=3)))[0]

    run, answer = asyncio.run(main())
    assert str(answer) == "start of new engines: engine 2 died"
    assert run.world.log == ["e2 killed"]
    assert run.places.added == {}
    assert run.world.fleet.fit


@pytest.mark.parametrize("dies", ["init_weight_transfer", "score"])
def test_engines_that_cannot_take_weights_are_given_up_and_the_others_go_on(
    dies: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> tuple[Ordered, Any]:
        run = Ordered(monkeypatch, tmp_path)

        class Broken(FakeEngine):
            def _note(self, what: str) -> None:
                if what == dies and self.name not in ("e0", "e1"):
                    raise RuntimeError(f"{self.name} is out of reach")
                super()._note(what)

        monkeypatch.setattr(push_fakes, "FakeEngine", Broken)
        return run, (await run.served(Order(engines=3)))[0]

    run, answer = asyncio.run(main())
    assert str(answer) == "the run goes on without the new engines: e2 is out of reach"
    assert run.world.fleet.names == ["engine 0", "engine 1"]
    assert run.world.fleet.fit
    assert run.places.added == {}
    assert run.world.announced[-1] == ["e0", "e1"]
    assert run.world.log[run.world.log.index("e2 killed") :].count("push 7") == 1


def test_a_desk_that_is_gone_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        run = Ordered(monkeypatch, tmp_path)
        await run.world.fleet.wait_started()
        run.desk.close()
        run.world.fleet.give_up(run.world.fleet._members[1:])  # news for the desk
        serving = asyncio.create_task(run.elastic.serve())
        await asyncio.sleep(0.1)
        assert not serving.done()
        serving.cancel()

    asyncio.run(main())
    assert caplog.text.count("can't be read or answered now") == 1


def test_engines_whose_machine_goes_while_they_start_are_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def gather(refs: Any, *, what: str, names: Any, timeout: float) -> Any:
        if what == "start of new engines":
            for ref in refs:
                ref.close()
            await asyncio.sleep(60)
        return list(await asyncio.gather(*refs))

    async def main() -> Any:
        run = Ordered(monkeypatch, tmp_path)
        monkeypatch.setattr(engine_fleet, "gather", gather)
        run.places.machines_gone = True
        return (await run.served(Order(more=1, on="machine")))[0]

    assert str(asyncio.run(main())) == "start of new engines: the machine of engine 2 is gone"


@pytest.mark.parametrize("on", ["machine", ""])
def test_an_engine_on_a_machine_that_joined_leaves_with_it(
    on: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All others are started again."""

    async def main() -> Ordered:
        run = Ordered(monkeypatch, tmp_path)
        await run.served(Order(more=1, on=on) if on else Order(engines=3))
        run.world.spawned[2].dead = True
        run.world.log.clear()
        await run.world.watch().look()
        return run

    run = asyncio.run(main())
    fleet = run.world.fleet
    assert fleet.names == (["engine 0", "engine 1"] if on else ["engine 0", "engine 1", "engine 2"])
    assert run.world.announced[-1] == (["e0", "e1"] if on else ["e0", "e1", "e3"])
    assert run.places.added == ({} if on else {2: ""})
    assert fleet.replaced == (0 if on else 1)
    assert fleet.fit
    assert ("the run goes on without it" in caplog.text) is bool(on)
    assert "push 7" in run.world.log


def test_the_desk_says_who_is_there_and_goes_with_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def main() -> Path:
        run = Ordered(monkeypatch, tmp_path)
        await run.served(Order(engines=1))
        return run.desk.place

    seen: list[RunningRun] = []
    tell = Desk.tell
    monkeypatch.setattr(Desk, "tell", lambda self, run: (seen.append(run), tell(self, run))[1])
    place = asyncio.run(main())
    assert [run.engines for run in seen[-2:]] == [("engine 0", "engine 1"), ("engine 0",)]
    assert not place.exists()
    with pytest.raises(ValueError, match="no run goes on in"):
        find_desk(tmp_path)
