"""What an engine makes of vLLM's own errors and answers, tried in a process of its own (vLLM stays out of the tests').

Only the model is a stand-in: exceptions, outputs and finish reasons are vLLM's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from openrlhf.agents.engine import Generation, SamplingParams
from openrlhf.rollout.engine import generate_many
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest, RequestFailure
from openrlhf.rollout.vllm.engine import VllmEngine


class StandIn:
    """An `AsyncLLM` that answers every request by `answer`. errored: its core is dead."""

    def __init__(self, answer: Callable[[Any], Any], *, errored: bool = False, silent: bool = False) -> None:
        self.answer = answer
        self.errored = errored
        self.silent = silent
        self.engine_core = self

    async def pause_scheduler_async(self, mode: str, *, clear_cache: bool) -> None: ...

    async def resume_scheduler_async(self) -> None: ...

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any = None) -> AsyncIterator[Any]:
        output = self.answer(prompt)
        if output is not None:
            yield output

    async def get_weight_version(self) -> str:
        if self.silent:
            from vllm.v1.engine.exceptions import EngineDeadError

            raise EngineDeadError
        return "0"


def output(finish_reason: Any) -> Any:
    """One answer of two tokens as vLLM gives it."""
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    logprobs = FlatLogprobs()
    for token in (7, 8):
        logprobs.append({token: Logprob(-0.5, 1, None)})
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=[7, 8],
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=None if finish_reason is None else str(finish_reason),
    )
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[5], prompt_logprobs=None, outputs=[completion], finished=True
    )


def raising(error: Exception, cause: Exception | None = None) -> Callable[[Any], Any]:
    def answer(prompt: Any) -> Any:
        raise error from cause

    return answer


async def asked(llm: StandIn, token_ids: Any = (5,)) -> tuple[str, str]:
    """(kind, message or finish reason) of one request that travels with others."""
    engine = VllmEngine(EngineSpec(model="M", name="engine 0"))
    engine._llm = llm  # type: ignore[assignment]
    requests = [
        GenerateRequest(request_id=f"r{i}", token_ids=ids, sampling=SamplingParams(max_tokens=2, seed=1))
        for i, ids in enumerate([token_ids])
    ]
    results: list[tuple[int, Any]] = []
    async with asyncio.timeout(30):
        async for chunk in generate_many(engine.generate, requests):
            results += chunk
    ((_, result),) = results
    if isinstance(result, RequestFailure):
        return ("engine" if result.engine_fault else "request"), result.message
    assert isinstance(result, Generation)
    return "answer", result.finish_reason


def outcomes() -> dict[str, tuple[str, str]]:
    """Case -> whose fault it was, and the words."""
    import numpy as np
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine import FINISH_REASON_STRINGS
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    cause = TypeError("Encoding objects of type numpy.int64 is unsupported")
    broken = raising(EngineGenerateError(), cause)
    cases: dict[str, tuple[StandIn, Any]] = {
        "recoverable": (StandIn(broken), [5]),
        "recoverable words of a dead core": (StandIn(broken, errored=True), [5]),
        "recoverable words of a core that gives no sign": (StandIn(broken, silent=True), [5]),
        "dead": (StandIn(raising(EngineDeadError())), [5]),
        "invalid": (StandIn(raising(VLLMValidationError("too hot"))), [5]),
        "unforeseen": (StandIn(raising(KeyError("x"))), [5]),
        "cancelled": (StandIn(raising(asyncio.CancelledError())), [5]),  # type: ignore[arg-type]
        "no answer": (StandIn(lambda _: None), [5]),
        "arrays": (StandIn(lambda p: output("stop" if type(p["prompt_token_ids"][0]) is int else "?")), np.array([5])),
        "floats": (StandIn(lambda _: output("stop")), [5, 6.0]),
        "unknown": (StandIn(lambda _: output("a new reason")), [5]),
        "none": (StandIn(lambda _: output(None)), [5]),
    }
    for name in FINISH_REASON_STRINGS:
        cases[f"finish {name}"] = (StandIn(lambda _, name=name: output(name)), [5])

    async def run_all() -> dict[str, tuple[str, str]]:
        return {name: await asked(*case) for name, case in cases.items()}

    return asyncio.run(run_all())
