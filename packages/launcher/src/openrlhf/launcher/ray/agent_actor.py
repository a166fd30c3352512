"""Agent workers: killable processes that host agents and reward functions and reach engines through a router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from openrlhf.agents.engine import EngineError, Generation
from openrlhf.agents.rewards import require_reward
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.launcher.ray.calls import first_line
from openrlhf.launcher.trainer.protocols import EvalRequest, SampleInfo
from openrlhf.launcher.trainer.samples import sample_info
from openrlhf.rollout.requests import (
    EngineDownError,
    GenerateRequest,
    RequestFailure,
    RequestRejectedError,
    raise_failure,
)

if TYPE_CHECKING:
    from openrlhf.agents.worker import AgentWorker
    from openrlhf.launcher.ray.agent_setup import AgentSpec
    from openrlhf.rollout.router import Router


SEND_WINDOW = 0.003
"""Seconds that a request waits for others: groups arrive one by one, and a message costs about a millisecond."""


class RayEngineClient:
    """An engine actor as the router sees it. Requests that come within SEND_WINDOW travel in one message."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
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
            self.actor.call.remote("abort", [request.request_id])
            raise

    def _flush(self) -> None:
        batch, self._waiting = [pair for pair in self._waiting if not pair[1].done()], []
        if not batch:
            return
        task = asyncio.ensure_future(self._send(batch))
        _RUNNING.add(task)
        task.add_done_callback(_RUNNING.discard)

    async def _send(self, batch: Sequence[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        failure = EngineDownError(f"{self.name}: the engine's stream ended early")
        try:
            stream = self.actor.generate_many.options(num_returns="streaming").remote([r for r, _ in batch])
            async for ref in stream:
                for number, result in await ref:
                    _settle(batch[number][1], result)
        except RayError as error:
            failure = EngineDownError(f"{self.name}: {first_line(error)}")
        except Exception as error:  # what cannot be sent, such as an image of a kind that does not pickle
            failure = RequestRejectedError(f"requests to {self.name} could not be sent: {first_line(error)}")
        for _, future in batch:
            if not future.done():
                future.set_exception(failure)

    async def health(self) -> None:
        """Raises EngineDownError when the engine does not answer."""
        try:
            await self.actor.call.remote("health")
        except RayError as error:
            raise EngineDownError(f"{self.name}: {first_line(error)}") from error


_RUNNING: set[asyncio.Task] = set()


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


class AgentActor:
    """Rolls groups out; the scalars go to the controller, the trajectories stay in the object store."""

    def __init__(self, spec: AgentSpec, engines: Sequence[tuple[str, Any]], number: int) -> None:
        self._spec = spec
        self._number = number
        self._router: Router | None = None
        self._loading = asyncio.Lock()
        self._clients = [RayEngineClient(name, engine) for name, engine in engines]
        self._worker: AgentWorker | None = None

    async def ready(self) -> None:
        """Load tokenizer, agent and reward function."""
        from openrlhf.launcher.ray.agent_setup import build_worker

        async with self._loading:
            if self._worker is None:
                self._worker, self._router = await build_worker(self._spec, self._clients, self._number)

    async def set_engines(self, engines: Sequence[tuple[str, Any]]) -> None:
        """Use these engine actors from now on."""
        known = {(client.name, client.actor): client for client in self._clients}
        self._clients = [known.get(engine) or RayEngineClient(*engine) for engine in engines]
        if self._router is not None:
            self._router.set_clients(self._clients)

    async def engines_down(self) -> dict[str, str]:
        """Engines that this worker has given up, with the reason."""
        return {} if self._router is None else self._router.down()

    async def run_group(
        self, item: PromptItem, evaluation: EvalRequest | None
    ) -> tuple[list[SampleInfo], list[Trajectory]]:
        """One prompt's samples."""
        if self._worker is None:
            await self.ready()
            assert self._worker is not None
        trajectories = await self._worker.run_group(
            item,
            evaluation=evaluation is not None,
            n_samples=evaluation.n_samples_per_prompt if evaluation else None,
            temperature=evaluation.temperature if evaluation else None,
        )
        if not self._spec.reward_model:
            trajectories = [require_reward(t) for t in trajectories]
        return [sample_info(t, max_len=self._spec.settings.max_length) for t in trajectories], trajectories

    async def shutdown(self) -> None:
        """End the reward worker's process."""
        if self._worker is not None:
            await self._worker.close()
