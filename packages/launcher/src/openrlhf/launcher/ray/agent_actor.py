"""Agent workers: killable processes that host agents and reward functions and reach engines through a router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from openrlhf.agents.rewards import require_reward
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_client import RayEngineClient
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.trainer.protocols import EvalRequest, SampleInfo
from openrlhf.launcher.trainer.samples import sample_info

if TYPE_CHECKING:
    from openrlhf.agents.worker import AgentWorker
    from openrlhf.launcher.ray.agent_setup import AgentSpec
    from openrlhf.rollout.router import Router


class AgentActor:
    """Rolls groups out; the scalars go to the controller, the trajectories stay in the object store."""

    def __init__(self, spec: AgentSpec, engines: Sequence[Remote[EngineActor]], number: int) -> None:
        self._spec = spec
        self._number = number
        self._router: Router | None = None
        self._loading = asyncio.Lock()
        self._clients = [RayEngineClient(engine) for engine in engines]
        self._worker: AgentWorker | None = None

    async def ready(self) -> None:
        """Load tokenizer, agent and reward function."""
        from openrlhf.launcher.ray.agent_setup import build_worker

        async with self._loading:
            if self._worker is None:
                self._worker, self._router = await build_worker(self._spec, self._clients, self._number)

    async def set_engines(self, engines: Sequence[Remote[EngineActor]]) -> None:
        """Use these engine actors from now on."""
        known = {client.engine: client for client in self._clients}
        self._clients = [known.get(engine) or RayEngineClient(engine) for engine in engines]
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
