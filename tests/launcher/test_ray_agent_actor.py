"""An engine actor as agent workers reach it: requests in one message, cancelled ones, what cannot be sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from openrlhf.agents.engine import EngineError, Generation, SamplingParams
from openrlhf.agents.recorder import Outcome, Recorder
from openrlhf.agents.types import PromptItem, StopReason
from openrlhf.launcher.ray.agent_actor import AgentActor, RayEngineClient
from openrlhf.rollout.requests import EngineDownError, GenerateRequest, RequestRejectedError

ANSWER = Generation(token_ids=[1], logprobs=[-0.5], versions=[0], finish_reason="stop")


async def value(content: Any) -> Any:
    return content


class Engine:
    """outcome: an answer for every request, an error of the stream, or None: no answer."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.messages: list[list[str]] = []
        self.aborted: list[str] = []
        self.generate_many = self.call = self

    def options(self, **_: Any) -> Engine:
        return self

    def remote(self, first: Any, *args: Any) -> Any:
        if first == "abort":
            self.aborted += args[0]
            return None
        if isinstance(self.outcome, TypeError):
            raise self.outcome
        self.messages.append([r.request_id for r in first])
        return self.stream(first)

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Any]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        for number, _ in enumerate(requests):
            if self.outcome is None:
                await asyncio.sleep(3600)
            yield value([(number, self.outcome)])


def request(number: int) -> GenerateRequest:
    return GenerateRequest(request_id=f"r{number}", token_ids=[1], sampling=SamplingParams())


def test_requests_that_come_together_travel_together() -> None:
    engine = Engine(ANSWER)

    async def main() -> list[Generation]:
        client = RayEngineClient("engine 0", engine)
        return await asyncio.gather(*(client.generate(request(i)) for i in range(3)))

    assert asyncio.run(main()) == [ANSWER] * 3
    assert engine.messages == [["r0", "r1", "r2"]]


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_a_cancelled_request_ends_in_the_engine_or_is_never_sent(wait: float) -> None:
    engine = Engine(None)

    async def main() -> None:
        asking = asyncio.create_task(RayEngineClient("engine 0", engine).generate(request(0)))
        await asyncio.sleep(wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.02)

    asyncio.run(main())
    assert engine.aborted == ["r0"]
    assert engine.messages == ([["r0"]] if wait else [])


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (ActorDiedError(), EngineDownError, "engine 0: The actor died"),
        (OutOfMemoryError("low on memory"), EngineDownError, "engine 0: low on memory"),
        (
            TypeError("cannot pickle image"),
            RequestRejectedError,
            "to engine 0 could not be sent: cannot pickle",
        ),
    ],
)
def test_every_request_of_a_broken_message_gets_its_reason(
    outcome: Exception, kind: type[EngineError], message: str
) -> None:
    async def main() -> list[Any]:
        client = RayEngineClient("engine 0", Engine(outcome))
        return await asyncio.gather(*(client.generate(request(i)) for i in range(2)), return_exceptions=True)

    errors = asyncio.run(main())
    assert [type(e) for e in errors] == [kind, kind]
    assert message in str(errors[0])


def test_an_engine_that_stays_keeps_its_client() -> None:
    first, second, new = Engine(None), Engine(None), Engine(None)
    spec: Any = None

    async def main() -> None:
        worker = AgentActor(spec, [("engine 0", first), ("engine 1", second)], 0)
        before = worker._clients
        await worker.set_engines([("engine 0", first), ("engine 1", new)])
        assert worker._clients[0] is before[0]
        assert worker._clients[1].actor is new
        assert await worker.engines_down() == {}

    asyncio.run(main())


@pytest.mark.parametrize("reward_model", [False, True])
def test_b148_only_a_reward_model_may_be_left_to_score_a_sample(reward_model: bool) -> None:
    """Without one, an agent that returns no reward would end the run in the controller."""
    item = PromptItem(group_id="g", prompt="p")
    unscored = Recorder([1]).finish(item, 0, Outcome(stop_reason=StopReason.DONE))
    actor = AgentActor(SimpleNamespace(reward_model=reward_model, max_len=64), [], 0)  # type: ignore[arg-type]
    actor._worker = SimpleNamespace(run_group=lambda *args, **options: value([unscored]))  # type: ignore[assignment]
    infos, trajectories = asyncio.run(actor.run_group(item, None))
    assert [info.failed for info in infos] == [t.failed for t in trajectories] == [not reward_model]
