"""The engine seam: which class a spec names, and a stream of requests over any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.rollout.engine import InferenceEngine, engine_class, generate_many
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest, RequestFailure, RequestRejectedError
from openrlhf.rollout.vllm.engine import VllmEngine

IS_AN_ENGINE: type[InferenceEngine] = VllmEngine  # for the type checker


def request(number: int) -> GenerateRequest:
    return GenerateRequest(request_id=f"r{number}", token_ids=[number], sampling=SamplingParams())


def test_a_spec_names_the_class_of_its_engine() -> None:
    assert engine_class(EngineSpec(model="m")) is VllmEngine


@pytest.mark.parametrize("name", ["none_such:Engine", "openrlhf.rollout.engine:Engine", "json", ""])
def test_a_class_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"no engine class {name!r}"):
        engine_class(EngineSpec(model="m", engine=name))


class Delays:
    """An engine whose request n takes n units of time; `refuses` fail, `breaks` raise what nobody foresaw."""

    def __init__(self, refuses: Sequence[int] = (), breaks: Sequence[int] = ()) -> None:
        self.refuses, self.breaks = refuses, breaks
        self.cancelled: list[int] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        (number,) = request.token_ids
        try:
            await asyncio.sleep(number * 0.02)
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        if number in self.refuses:
            raise RequestRejectedError(f"{request.request_id} is too hot")
        if number in self.breaks:
            raise KeyError(number)
        return Generation(token_ids=[number], logprobs=[0.0], versions=[0], finish_reason="stop")


def test_results_come_as_they_finish_and_a_failure_is_one() -> None:
    async def main() -> list[tuple[int, Generation | RequestFailure]]:
        engine = Delays(refuses=[1], breaks=[2])
        stream = generate_many(engine.generate, [request(n) for n in (3, 1, 2, 0)])
        return [pair async for chunk in stream for pair in chunk]

    results = asyncio.run(main())
    assert [position for position, _ in results] == [3, 1, 2, 0]
    messages = [result.message for _, result in results if isinstance(result, RequestFailure)]
    assert messages == ["r1 is too hot", "request r2 failed: KeyError(2)"]
    assert [list(result.token_ids) for _, result in results if isinstance(result, Generation)] == [[0], [3]]


def test_closing_the_stream_ends_what_is_unfinished() -> None:
    async def main() -> list[int]:
        engine = Delays()
        stream = generate_many(engine.generate, [request(n) for n in (0, 500, 600)])
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        return engine.cancelled

    assert asyncio.run(main()) == [500, 600]
