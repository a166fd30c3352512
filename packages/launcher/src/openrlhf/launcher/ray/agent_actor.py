"""Agent workers: killable processes that host agents and reward functions and reach engines through a router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.context import EpisodeSettings, GroupExecutor
from openrlhf.agents.executor import SingleTurnExecutor
from openrlhf.agents.files import CodeFile
from openrlhf.agents.proxies import keep_loopback_direct
from openrlhf.agents.reward_process import RewardPool
from openrlhf.agents.rewards import require_reward
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.agents.watchdog import exit_process
from openrlhf.agents.worker import AgentWorker
from openrlhf.launcher.json_servers import RetryPolicy
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_client import RayEngineClient
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.redaction import configure_logging
from openrlhf.launcher.rewards.http import HttpRewardSource
from openrlhf.launcher.samples import EvalRequest, SampleInfo, sample_info
from openrlhf.launcher.tokenizers import load_tokenizer
from openrlhf.launcher.tracing import TraceTarget, child_of, start_tracing
from openrlhf.launcher.vision import ImageProcessor
from openrlhf.rollout.router import EngineClient, Router


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """What an agent worker is made of. Files travel by content, so that they work on nodes without a shared disk.

    vision: whether the model takes images. reward_urls: HTTP reward servers. reward_model: whether one scores what
    comes back without a reward. rewards_optional: such a sample has the reward 0.
    """

    tokenizer_path: str
    settings: EpisodeSettings
    vision: bool = False
    reward_model: bool = False
    rewards_optional: bool = False
    agent_file: CodeFile | None = None
    reward_file: CodeFile | None = None
    reward_urls: tuple[str, ...] = ()
    reward_api_key: str | None = None
    reward_timeout: float = 60.0
    tracing: TraceTarget | None = None


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
        self, item: PromptItem, evaluation: EvalRequest | None, parent: str | None = None
    ) -> tuple[list[SampleInfo], list[Trajectory]]:
        """One prompt's samples. parent: the span that they belong to."""
        if self._worker is None:
            await self.ready()
            assert self._worker is not None
        with child_of(parent):
            trajectories = await self._worker.run_group(
                item,
                evaluation=evaluation is not None,
                n_samples=evaluation.n_samples_per_prompt if evaluation else None,
                temperature=evaluation.temperature if evaluation else None,
            )
        if self._spec.rewards_optional and not self._spec.reward_model:
            trajectories = [t if t.failed or t.reward is not None else replace(t, reward=0.0) for t in trajectories]
        elif not self._spec.reward_model:
            trajectories = [require_reward(t) for t in trajectories]
        return [sample_info(t, max_len=self._spec.settings.max_length) for t in trajectories], trajectories

    async def shutdown(self) -> None:
        """End the reward worker's process."""
        if self._worker is not None:
            await self._worker.close()


async def build_worker(spec: AgentSpec, clients: Sequence[EngineClient], number: int) -> tuple[AgentWorker, Router]:
    """Load everything an agent worker needs; an author's broken file raises here."""
    configure_logging(logging.WARNING, quiet=())
    keep_loopback_direct()
    start_tracing(spec.tracing, f"agent worker {number}")
    router = Router(clients, first=number)
    source = await reward_source(spec)
    executor: GroupExecutor = load_executor(spec.agent_file) if spec.agent_file else SingleTurnExecutor(source)
    worker = AgentWorker(
        executor,
        router,
        load_tokenizer(spec.tokenizer_path),
        spec.settings,
        image_reader=ImageProcessor(spec.tokenizer_path) if spec.vision else None,
        on_blocked=exit_process,
        closers=[] if source is None else [source.close],
    )
    await worker.start()
    return worker, router


async def reward_source(spec: AgentSpec) -> RewardPool | HttpRewardSource | None:
    """The reward function's process pool, or the client of the reward servers; None for an in-cluster model."""
    if spec.reward_file is not None:
        pool = RewardPool(spec.reward_file, spec.reward_timeout)
        await pool.start()
        return pool
    if spec.reward_urls:
        retry = RetryPolicy(timeout=spec.reward_timeout)
        return HttpRewardSource(spec.reward_urls, api_key=spec.reward_api_key, retry=retry)
    return None
