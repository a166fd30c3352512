"""Engine actors as agent workers and learner ranks reach them.

Requests travel in one message, cancelled ones end in the engine, what cannot be sent gets its reason. In a push every
engine gets its own ranks, and errors say which call they broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from openrlhf.agents.engine import EngineError, Generation, SamplingParams
from openrlhf.launcher.ray import engine_client
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_client import FleetClient, RayEngineClient
from openrlhf.launcher.ray.remote import Remote
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
        self.generate_many = self
        self.abort = SimpleNamespace(remote=self.aborted.extend)

    def options(self, **_: Any) -> Engine:
        return self

    def remote(self, requests: Sequence[GenerateRequest]) -> Any:
        if isinstance(self.outcome, TypeError):
            raise self.outcome
        self.messages.append([r.request_id for r in requests])
        return self.stream(requests)

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
        client = RayEngineClient(Remote("engine 0", engine))
        return await asyncio.gather(*(client.generate(request(i)) for i in range(3)))

    assert asyncio.run(main()) == [ANSWER] * 3
    assert engine.messages == [["r0", "r1", "r2"]]


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_a_cancelled_request_ends_in_the_engine_or_is_never_sent(wait: float) -> None:
    engine = Engine(None)

    async def main() -> None:
        asking = asyncio.create_task(RayEngineClient(Remote("engine 0", engine)).generate(request(0)))
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
        client = RayEngineClient(Remote("engine 0", Engine(outcome)))
        return await asyncio.gather(*(client.generate(request(i)) for i in range(2)), return_exceptions=True)

    errors = asyncio.run(main())
    assert [type(e) for e in errors] == [kind, kind]
    assert message in str(errors[0])


class Noting:
    """An engine actor that writes its calls down."""

    def __init__(self, calls: list[tuple[Any, ...]], name: str) -> None:
        self._calls, self._name = calls, name

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._calls.append((self._name, method, *args)) or self._name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []
    waits: Any = lambda refs, *, what, timeout: seen.append((what, *refs, timeout))  # noqa: E731
    monkeypatch.setattr(engine_client, "get", waits)
    return seen


def client(calls: list[tuple[Any, ...]]) -> FleetClient:
    engines = [Remote[EngineActor](name, Noting(calls, name)) for name in ("e0", "e1", "e2")]
    return FleetClient(engines=engines, num_workers=[2, 1, 4], update_timeout=15.0)


def test_every_engine_joins_with_its_own_first_rank(calls: list[tuple[Any, ...]]) -> None:
    client(calls).init_weight_transfer_engine({"rank_offset": 1, "master_port": 5})
    offsets = [args[2]["rank_offset"] for args in calls[:3]]
    assert offsets == [1, 3, 4]
    assert {args[2]["master_port"] for args in calls[:3]} == {5}
    assert calls[3] == ("weight group", "e0", "e1", "e2", 60.0)


def test_ipc_engines_join_nothing(calls: list[tuple[Any, ...]]) -> None:
    client(calls).init_weight_transfer_engine({"packed": True})
    assert calls[0] == ("e0", "init_weight_transfer", {"packed": True})


def test_a_push_has_three_parts_and_a_version(calls: list[tuple[Any, ...]]) -> None:
    own = client(calls)
    own.start_weight_update()
    own.update_weights({"names": ["a"]})
    own.finish_weight_update("7")
    assert [entry for entry in calls if entry[0] in ("e2", "weight push")] == [
        ("e2", "start_weight_update"),
        ("e2", "update_weights", {"names": ["a"]}),
        ("weight push", "e0", "e1", "e2", 15.0),
        ("e2", "finish_weight_update", 7),
    ]
