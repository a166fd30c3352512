"""What an inference engine is: generation and control. vLLM's is the folder `vllm/`; another engine is another folder.

Which class a run uses is `EngineSpec.engine`. How requests and weights reach it (Ray, a router, a process group) is no
business of the engine.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from openrlhf.agents.engine import Generation
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import GenerateRequest, RequestFailure, result_of

if TYPE_CHECKING:
    from openrlhf.rollout.weights.wire import BucketPlan

CHUNK_WINDOW_S = 0.002
"""How long a finished sample of a stream waits for others to travel with it: a message costs about as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHealth:
    """A sign of life. running: requests under way. unfit: why the engine must not serve; empty when it may.

    totals: with `EngineSpec.stats` what it measured since its start, by name, added up over its iterations; see
    `vllm/stats.py`. Another engine may measure less.
    """

    version: int
    running: int
    paused: bool
    unfit: str
    totals: Mapping[str, float] = field(default_factory=dict)


class EngineControl(Protocol):
    """What training asks of an engine beside samples; calls may come while requests run, and must not wait for them.

    Weights: `init_weight_transfer` once per weight group, then pushes. Over gloo a push is `receive_weights`; senders
    over nccl and CUDA IPC call its parts, start_, update_ (once or often) and finish_. Samples carry the version of the
    last whole push per token. Requests that come during a push wait for its end. After a failed push the engine must
    refuse to serve until a whole one has come. Methods raise EngineDownError when the engine can't do what is asked.
    """

    async def health(self) -> EngineHealth:
        """A sign of life of what computes, not of its front alone."""
        ...

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Per row of tokens the log-probability of each given those before it, at temperature 1; the first is 0.0."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End running requests, all of them by default; their callers get what was sampled. Returns how many."""
        ...

    async def pause(self, *, clear_cache: bool = False) -> None:
        """Freeze running requests until `resume`; they go on with the weights of then.

        clear_cache: what was computed of them with older weights (their KV cache) is computed again.
        """
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def sleep(self) -> None:
        """Free the device's memory; requests that still run are aborted. Nothing on a CPU."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Undo `sleep` for one part: "weights" is enough to take a push, "kv_cache" to sample."""
        ...

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Join the trainer's weight group (`GroupAddress.for_engine`, or what the trainer's sender says)."""
        ...

    async def receive_weights(self, plan: BucketPlan, version: int) -> None:
        """One whole push over gloo, which the trainer sends at the same time; the weights become `version`."""
        ...

    async def start_weight_update(self) -> None:
        """First part of a push."""
        ...

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Second part of a push: receive tensors."""
        ...

    async def finish_weight_update(self, version: int) -> None:
        """Last part of a push: the weights become `version`."""
        ...

    async def give_up_push(self) -> EngineHealth:
        """After a push that failed elsewhere: make ready for the next one.

        Raises EngineDownError when this engine is stuck in it and must be started again.
        """
        ...

    async def shutdown(self) -> None:
        """End; safe to call twice."""
        ...


class InferenceEngine(EngineControl, Protocol):
    """One engine. All methods run on one event loop. The router takes it as it is (`EngineClient`)."""

    name: str

    def __init__(self, spec: EngineSpec) -> None: ...

    @staticmethod
    def environment(spec: EngineSpec) -> dict[str, str]:
        """Defaults of environment variables for its process, set before anything is imported; the user's win."""
        ...

    async def start(self, *, serve: bool = True) -> None:
        """Load the model. serve: whether requests may come before the first push. Raises EngineError with the reason.

        Not in a run: an engine that was started again would serve the model that training began with.
        """
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """One sample. Raises RequestRejectedError (this request's fault) or EngineDownError (the engine's)."""
        ...


def engine_class(spec: EngineSpec) -> type[InferenceEngine]:
    """The class that `spec.engine` names. Raises ValueError where there is none."""
    module, _, name = spec.engine.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no engine class {spec.engine!r} (module:Class): {error}") from error


async def generate_many(
    generate: Callable[[GenerateRequest], Awaitable[Generation]], requests: Sequence[GenerateRequest]
) -> AsyncIterator[list[tuple[int, Generation | RequestFailure]]]:
    """All samples, in chunks of (position in `requests`, result) as they finish.

    One stream instead of one call per sample keeps the messages between processes few. A request that fails,
    whatever it raises, is a result. Closing the iterator cancels what is unfinished.
    """
    done: asyncio.Queue[tuple[int, Generation | RequestFailure]] = asyncio.Queue()

    def settle(position: int, task: asyncio.Future[Generation]) -> None:
        done.put_nowait((position, result_of(requests[position].request_id, task)))

    tasks = [asyncio.ensure_future(generate(request)) for request in requests]
    for position, task in enumerate(tasks):
        task.add_done_callback(functools.partial(settle, position))
    try:
        left = len(tasks)
        while left:
            chunk = [await done.get()]
            if len(chunk) < left:
                await asyncio.sleep(CHUNK_WINDOW_S)
            while not done.empty():
                chunk.append(done.get_nowait())
            left -= len(chunk)
            yield chunk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
