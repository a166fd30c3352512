"""When an engine may serve, on a stand-in for vLLM: before the first push, during one, after a failed one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import EngineDownError
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.weights.wire import BucketPlan


class Core:
    """The calls of a push. breaks: the one that fails; hangs: the one that gets no answer."""

    def __init__(self, breaks: str = "", hangs: str = "") -> None:
        self.breaks = breaks
        self.hangs = hangs
        self.errored = False
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> None:
            self.asked.append(name)
            await asyncio.sleep(0)
            if name == self.breaks:
                raise RuntimeError(f"{name} broke")
            if name == self.hangs:
                await asyncio.Event().wait()

        return call


def engine(breaks: str = "") -> VllmEngine:
    made = VllmEngine(EngineSpec(model="M", name="engine 0"))
    made._llm = Core(breaks)  # type: ignore[assignment]
    return made


async def whole_push(own: VllmEngine) -> None:
    await own.start_weight_update()
    await own.finish_weight_update(1)


def test_requests_that_come_during_a_push_wait_for_its_end() -> None:
    async def main() -> None:
        own = engine()
        await own._ready_for("r0")
        await own.start_weight_update()
        waiting = asyncio.create_task(own._ready_for("r1"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert (await own.health()).unfit != ""
        await own.finish_weight_update(3)
        await asyncio.wait_for(waiting, 5)
        assert (own.version, (await own.health()).unfit) == (3, "")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("step", "what"),
    [
        ("finish_weight_update", "finish a weight push"),
        ("update_weight_version", "go over to the weights of a push"),
        ("reset_prefix_cache", "go over to the weights of a push"),
    ],
)
def test_requests_that_come_during_a_push_move_when_it_fails(step: str, what: str) -> None:
    async def main() -> None:
        own = engine(step)
        await own.start_weight_update()
        waiting = asyncio.create_task(own._ready_for("r1"))
        with pytest.raises(EngineDownError, match=f"could not {what}: {step} broke"):
            await own.finish_weight_update(3)
        with pytest.raises(EngineDownError, match="engine 0 must not serve request r1: a weight push has failed"):
            await asyncio.wait_for(waiting, 5)
        own._llm = Core()  # type: ignore[assignment]
        await own.start_weight_update()
        await own.finish_weight_update(4)
        await own._ready_for("r2")

    asyncio.run(main())


def test_a_core_that_dies_in_a_push_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf.rollout.vllm.engine.DEATH_POLL_S", 0.01)

    async def main() -> None:
        own, core = VllmEngine(EngineSpec(model="M", name="engine 0")), Core(hangs="finish_weight_update")
        own._llm = core  # type: ignore[assignment]
        await own.start_weight_update()
        pushing = asyncio.create_task(own.finish_weight_update(1))
        await asyncio.sleep(0.05)
        assert not pushing.done()
        core.errored = True
        with pytest.raises(EngineDownError, match="the engine core died and did not finish a weight push"):
            await asyncio.wait_for(pushing, 5)

    asyncio.run(main())


def test_n12_requests_left_over_at_a_push_are_aborted(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        own = engine()
        own._live |= {"r0#1", "r1#2"}
        asked: list[str] = []

        async def abort(names: list[str]) -> None:
            asked.extend(names)
            asyncio.get_running_loop().call_later(0.02, own._live.clear)

        own._llm.abort = abort  # type: ignore[union-attr,method-assign,assignment]
        await own.start_weight_update()
        assert (sorted(asked), own._live) == (["r0#1", "r1#2"], set())
        await own.finish_weight_update(1)
        await own._ready_for("r2")

    asyncio.run(asyncio.wait_for(main(), 10))
    assert "engine 0 aborts 2 requests left over: r0#1, r1#2" in caplog.text


def test_an_engine_that_was_shut_down_has_nothing_to_abort() -> None:
    """Agent workers whose samples are cancelled at the end of a run ask for it."""
    own = VllmEngine(EngineSpec(model="M", name="engine 0"))
    own._live.add("r0#1")
    assert asyncio.run(own.abort(["r0"])) == 0


def test_n12_a_paused_engine_keeps_its_requests_during_a_push() -> None:
    async def main() -> None:
        own = engine()
        own._live.add("r0#1")
        await own.pause()
        await own.start_weight_update()
        assert own._live == {"r0#1"}

    asyncio.run(asyncio.wait_for(main(), 10))


def test_n12_a_request_that_does_not_end_fails_the_push_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf.rollout.vllm.engine.DEATH_POLL_S", 0.01)
    monkeypatch.setattr("openrlhf.rollout.vllm.engine.PUSH_TIMEOUT_S", 0.03)

    async def main() -> None:
        own = engine()
        own._live.add("r0#1")
        with pytest.raises(EngineDownError, match=r"could not end left-over requests: .* within 0\.03 s"):
            await own.start_weight_update()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_an_engine_between_two_parts_of_a_push_that_failed_elsewhere_takes_the_next_one() -> None:
    async def main() -> None:
        core = Core()
        own = engine()
        own._llm = core  # type: ignore[assignment]
        await own.start_weight_update()
        assert "failed" in (await own.give_up_push()).unfit
        assert core.asked[-2:] == ["finish_weight_update", "get_weight_version"]
        with pytest.raises(EngineDownError, match="must not serve"):
            await own._ready_for("r1")
        await own.start_weight_update()
        await own.finish_weight_update(4)
        await own._ready_for("r2")

    asyncio.run(main())


def test_an_engine_that_stays_in_a_failed_push_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf.rollout.vllm.engine.GIVE_UP_TIMEOUT_S", 0.05)
    monkeypatch.setattr("openrlhf.rollout.vllm.engine.DEATH_POLL_S", 0.01)

    async def main() -> None:
        own = VllmEngine(EngineSpec(model="M", name="engine 0"))
        own._llm = Core(hangs="finish_weight_update")  # type: ignore[assignment]
        await own.start_weight_update()
        stuck = asyncio.create_task(own.finish_weight_update(1))
        await asyncio.sleep(0)
        with pytest.raises(EngineDownError, match=r"engine 0 did not give up a failed weight push within 0\.05 s"):
            await own.give_up_push()
        stuck.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("step", ["start_weight_update", "finish_weight_update"])
def test_an_engine_that_can_begin_or_end_no_push_must_be_started_again(step: str) -> None:
    # vLLM's workers refuse both for good when only some of them have failed in a push
    async def main() -> None:
        own = engine(step)
        with pytest.raises(EngineDownError, match=f"{step} broke"):
            await whole_push(own)
        with pytest.raises(EngineDownError, match="engine 0 can take no weights any more"):
            await own.give_up_push()

    asyncio.run(main())


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_only_gloo_takes_a_push_in_one_call(backend: Any) -> None:
    own = VllmEngine(EngineSpec(model="M", name="engine 0", sync_backend=backend))
    with pytest.raises(ValueError, match=f"an {backend} sender calls start_, update_ and finish_ itself"):
        asyncio.run(own.receive_weights(BucketPlan(()), 1))


def test_workers_that_did_receive_leave_a_push_in_which_others_failed() -> None:
    # vLLM's workers leave a push one by one; those that are still in it would refuse the next one
    async def main() -> None:
        core = Core("update_weights")
        own = engine()
        own._llm = core  # type: ignore[assignment]
        await own.start_weight_update()
        with pytest.raises(EngineDownError, match="could not receive weights"):
            await own.update_weights({})
        assert "failed" in (await own.give_up_push()).unfit
        assert core.asked[-2:] == ["finish_weight_update", "get_weight_version"]

    asyncio.run(main())
