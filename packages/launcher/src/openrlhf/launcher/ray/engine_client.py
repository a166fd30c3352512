"""Engine actors as other processes reach them: agent workers with requests, learner ranks with weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from openrlhf.agents.engine import EngineError, Generation
from openrlhf.launcher.ray.calls import first_line, get
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.remote import Remote
from openrlhf.rollout.engine import EngineControl, EngineHealth
from openrlhf.rollout.requests import (
    EngineDownError,
    GenerateRequest,
    RequestFailure,
    RequestRejectedError,
    raise_failure,
)

SEND_WINDOW = 0.003
"""Seconds that a request waits for others: groups arrive one by one, and a message costs about a millisecond."""
JOIN_TIMEOUT = 60.0
STEP_TIMEOUT = 600.0
"""Bound of the beginning and the end of a push, in which engines put their layers together."""
_SENDING: set[asyncio.Task[None]] = set()
"""Messages under way: an event loop alone does not keep its tasks, and a client may be replaced meanwhile."""


class RayEngineClient:
    """An engine actor as the router sees it. Requests that come within SEND_WINDOW travel in one message."""

    def __init__(self, engine: Remote[EngineActor]) -> None:
        self.name = engine.name
        self.engine = engine
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises EngineDownError when the engine's process is gone, RequestRejectedError when it refuses the request.

        A request that is cancelled here ends in the engine too.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        if not self._waiting:
            loop.call_later(SEND_WINDOW, self._flush)
        self._waiting.append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            self.engine.ask(EngineControl.abort, [request.request_id])
            raise

    def _flush(self) -> None:
        batch, self._waiting = [pair for pair in self._waiting if not pair[1].done()], []
        if batch:
            task = asyncio.ensure_future(self._send(batch))
            _SENDING.add(task)
            task.add_done_callback(_SENDING.discard)

    async def _send(self, batch: Sequence[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        failure = EngineDownError(f"{self.name}: the engine's stream ended early")
        try:
            async for ref in self.engine.stream(EngineActor.generate_many, [request for request, _ in batch]):
                for number, result in await ref:
                    _settle(batch[number][1], result)
        except RayError as error:
            failure = EngineDownError(f"{self.name}: {first_line(error)}")
        except Exception as error:  # what cannot be sent, such as an image of a kind that does not pickle
            failure = RequestRejectedError(f"requests to {self.name} could not be sent: {first_line(error)}")
        for _, future in batch:
            if not future.done():
                future.set_exception(failure)

    async def health(self) -> EngineHealth:
        """Raises EngineDownError when the engine does not answer."""
        try:
            return await self.engine.ask(EngineControl.health)
        except RayError as error:
            raise EngineDownError(f"{self.name}: {first_line(error)}") from error


def _settle(future: asyncio.Future[Generation], result: Generation | RequestFailure) -> None:
    if future.done():
        return  # the sample was cancelled meanwhile
    if isinstance(result, RequestFailure):
        try:
            raise_failure(result)
        except EngineError as error:
            future.set_exception(error)
    else:
        future.set_result(result)


@dataclass(frozen=True, kw_only=True)
class FleetClient:
    """All engines of a run as vLLM's trainer engines call them from a learner rank (nccl, CUDA IPC).

    Each call goes to every engine and returns when all have answered. num_workers: how many ranks of a weight group
    each engine takes. update_timeout: seconds for one `update_weights`. Raises WorkerDiedError when an engine dies or
    does not answer in time, else the engine's own error.
    """

    engines: Sequence[Remote[EngineActor]]
    num_workers: Sequence[int]
    update_timeout: float

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine join. vLLM knows of one engine; each gets the first of its own ranks."""
        refs, offset = [], init_info.get("rank_offset")
        for engine, workers in zip(self.engines, self.num_workers, strict=True):
            own = init_info if offset is None else init_info | {"rank_offset": offset}
            refs.append(engine.ask(EngineControl.init_weight_transfer, own))
            offset = None if offset is None else offset + workers
        get(refs, what="weight group", timeout=JOIN_TIMEOUT)

    def start_weight_update(self) -> None:
        """Begin a push."""
        refs = [engine.ask(EngineControl.start_weight_update) for engine in self.engines]
        get(refs, what="weight push start", timeout=STEP_TIMEOUT)

    def update_weights(self, update_info: Any) -> None:
        """Receive tensors: all of a push over nccl, those of one buffer over CUDA IPC."""
        refs = [engine.ask(EngineControl.update_weights, update_info) for engine in self.engines]
        get(refs, what="weight push", timeout=self.update_timeout)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The weights become this version."""
        assert weight_version is not None, "every push of ours has a version"
        refs = [engine.ask(EngineControl.finish_weight_update, int(weight_version)) for engine in self.engines]
        get(refs, what="weight push end", timeout=STEP_TIMEOUT)
