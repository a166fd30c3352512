"""A weight push over fake engines and ranks: the exact order of calls, dying engines, what agent workers hear of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openrlhf.launcher.ray import engine_fleet
from openrlhf.launcher.ray.calls import WorkerDiedError
from openrlhf.launcher.ray.learner_actor import LearnerActor
from openrlhf.launcher.ray.weight_push import Pause
from support.push_fakes import BreaksOnce, FakePolicy, World


def test_a_push_is_sent_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[str]:
        world = await World(monkeypatch).started()
        metrics = await world.push.push(world.policy, 3)
        assert metrics["rollout/sync_error"] == 0
        assert world.announced == []
        return world.log

    assert asyncio.run(main()) == [
        "open_weight_group",
        "e0 init_weight_transfer",
        "e1 init_weight_transfer",
        "push 3",
        "e0 receive_weights",
        "e1 receive_weights",
        "e0 generate_many",
        "e0 score",
        "e1 score",
    ]


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_ranks_drive_the_engines_over_nccl_and_ipc(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    async def main() -> list[str]:
        world = await World(monkeypatch, backend=backend).started()
        await world.push.push(world.policy, 3)
        return [entry for entry in world.log if not entry.startswith("e1")]

    assert asyncio.run(main()) == ["open_weight_group", "push 3", "e0 generate_many", "e0 score"]


@pytest.mark.parametrize("backend", ["gloo", "nccl", "ipc"])
def test_an_engine_that_stays_in_a_failed_push_is_replaced(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    # its wait inside nccl never ends: it is killed, never waited for
    async def main() -> World:
        world = await World(monkeypatch, backend=backend, dies="give_up_push").started()
        policy: Any = BreaksOnce(world.log)
        await world.push.push(policy, 5)
        return world

    world = asyncio.run(main())
    again = world.log[world.log.index("e0 killed") :]
    assert again[:3] == ["e0 killed", "e2 start", "open_weight_group"]
    assert {"push 5", "e1 score", "e2 score"} <= set(again)
    assert world.fleet.fit


def test_hybrid_engines_wake_weights_first_and_the_cache_after_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[str]:
        world = await World(monkeypatch).started()
        await world.push.push(world.policy, 0)
        await world.fleet.sleep()
        world.log.clear()
        await world.push.push(world.policy, 1)
        await world.fleet.wake_weights()  # awake already
        await world.fleet.wake_cache()
        return [entry for entry in world.log if not entry.startswith("e1")]

    assert asyncio.run(main()) == ["e0 wake weights", "push 1", "e0 receive_weights", "e0 wake kv_cache", "e0 score"]


@pytest.mark.parametrize("clear_cache", [False, True])
def test_partial_rollout_pauses_engines_around_the_push(monkeypatch: pytest.MonkeyPatch, clear_cache: bool) -> None:
    async def main() -> list[str]:
        world = await World(monkeypatch, pause=Pause(clear_cache=clear_cache)).started()
        await world.push.push(world.policy, 0)
        world.log.clear()
        await world.push.push(world.policy, 1)
        return [entry for entry in world.log if not entry.startswith("e1")]

    pause = f"e0 pause {clear_cache}"
    assert asyncio.run(main()) == [pause, "push 1", "e0 receive_weights", "e0 resume", "e0 score"]


@pytest.mark.parametrize("dies", ["receive_weights", "init_weight_transfer", "score"])
def test_engine_that_dies_in_a_push_is_replaced_and_all_get_everything_again(
    monkeypatch: pytest.MonkeyPatch, dies: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> World:
        world = await World(monkeypatch, dies=dies).started()
        await world.push.push(world.policy, 5)
        return world

    world = asyncio.run(main())
    again = world.log[world.log.index("e2 start") :]
    assert again[:2] == ["e2 start", "open_weight_group"]
    assert {"e1 receive_weights", "e2 receive_weights", "e2 score"} <= set(again)
    assert world.announced == [["e2", "e1"]]
    assert world.fleet.fit
    assert "engine 0 is gone (e0 died): starting it again" in caplog.text
    assert "weight push 5 failed" in caplog.text


@pytest.mark.parametrize("dies", ["wake weights", "wake kv_cache", "pause False", "resume"])
def test_engine_that_dies_beside_the_transfer_is_replaced_too(monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    async def main() -> World:
        world = await World(monkeypatch, dies=dies, pause=Pause(clear_cache=False)).started()
        world.fleet.state = "asleep"
        await world.push.push(world.policy, 5)
        return world

    world = asyncio.run(main())
    assert {"e1 receive_weights", "e2 receive_weights", "e2 score"} <= set(world.log)
    assert world.announced == [["e2", "e1"]]
    assert world.fleet.state == "awake"


@pytest.mark.parametrize("dies", ["sleep", "wake weights"])
def test_engine_that_dies_between_phases_is_left_to_the_watch(
    monkeypatch: pytest.MonkeyPatch, dies: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> World:
        world = await World(monkeypatch, dies=dies).started()
        await world.push.push(world.policy, 5)
        await world.fleet.sleep()
        if dies != "sleep":
            await world.fleet.wake_weights()
            await world.fleet.wake_cache()
        await world.watch().look()
        return world

    world = asyncio.run(main())
    assert "e0 died" in caplog.text
    assert world.announced == [["e2", "e1"]]
    assert world.fleet.state == ("asleep" if dies == "sleep" else "awake")


def test_engines_restarted_while_the_models_work_sleep_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[str]:
        world = await World(monkeypatch, sleeps=True).started()
        await world.push.push(world.policy, 5)
        await world.fleet.sleep()
        world.spawned[0].dead = True
        world.log.clear()
        async with world.push.alone():  # forward passes
            looking = asyncio.create_task(world.watch().look())
            for _ in range(20):
                await asyncio.sleep(0)
            assert world.log == []
        await looking
        return [entry for entry in world.log if not entry.startswith("e1")]

    assert asyncio.run(main()) == [
        "e0 killed",
        "e2 start",
        "e2 sleep",
        "e2 wake weights",
        "e2 pause False",
        "open_weight_group",
        "e2 init_weight_transfer",
        "push 5",
        "e2 receive_weights",
        "e2 wake kv_cache",
        "e2 resume",
        "e2 score",
        "e2 sleep",
    ]


def test_watch_replaces_a_dead_engine_with_the_weights_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> World:
        world = await World(monkeypatch).started()
        watch = world.watch()
        await watch.look()
        assert world.log == []
        await world.push.push(world.policy, 7)
        world.spawned[0].dead = True
        world.log.clear()
        await watch.look()
        await watch.look()
        return world

    world = asyncio.run(main())
    assert world.log[:2] == ["e0 killed", "e2 start"]
    assert "push 7" in world.log
    assert world.log.index("e1 pause False") < world.log.index("push 7")
    assert world.log.index("push 7") < world.log.index("e1 resume")
    assert world.announced == [["e2", "e1"]]


def test_engines_that_workers_gave_up_serve_again_when_they_are_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> World:
        world = await World(monkeypatch).started()
        await world.push.push(world.policy, 7)
        world.down = {"engine 1": "was silent"}
        await world.watch().look()
        return world

    assert asyncio.run(main()).announced == [["e0", "e1"]]


def test_engines_that_always_die_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = await World(monkeypatch).started()
        monkeypatch.setattr(engine_fleet, "MAX_REPLACED", 2)
        for _ in range(3):
            world.fleet.engines[0].actor.dead = True
            await world.fleet.revive()

    with pytest.raises(WorkerDiedError, match="3 engines were lost, the last one: e3 died"):
        asyncio.run(main())


class PlansPolicy(FakePolicy):
    """Notes whether each plan leaves frozen weights out."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.plans: list[bool] = []

    def ask_process(self, method: Any, *args: Any) -> str:
        if method is LearnerActor.plan_push:
            self.plans.append(args[1])
        return super().ask_process(method, *args)


def test_frozen_weights_travel_once_over_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[bool]:
        world = await World(monkeypatch).started()
        policy: Any = PlansPolicy(world.log)
        for version in (1, 2, 3):
            await world.push.push(policy, version)
        world.spawned[0].dead = True
        await world.push.push(policy, 4)
        await world.push.push(policy, 5)
        return policy.plans

    # everything, then what is trained; the failed push; everything to the new engine, then what is trained
    assert asyncio.run(main()) == [False, True, False, True]
