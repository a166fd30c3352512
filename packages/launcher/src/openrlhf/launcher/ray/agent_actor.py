"""Agent workers: killable processes that host agents and reward functions and reach engines through a router."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, GroupExecutor
from openrlhf.agents.environments import EnvironmentTable, load_environments
from openrlhf.agents.executor import SingleTurnExecutor
from openrlhf.agents.files import CodeFile
from openrlhf.agents.proxies import keep_loopback_direct
from openrlhf.agents.reward_sources import RewardSources
from openrlhf.agents.rewards import require_reward
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.agents.watchdog import exit_process
from openrlhf.agents.worker import AgentWorker
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_client import RayEngineClient
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.ray.stopped import end_when_stopped
from openrlhf.launcher.redaction import configure_logging
from openrlhf.launcher.rewards.sources import RewardSpec, make_sources
from openrlhf.launcher.samples import EvalRequest, SampleInfo, sample_info
from openrlhf.launcher.tokenizers import load_tokenizer
from openrlhf.launcher.tracing import TraceTarget, child_of, start_tracing
from openrlhf.launcher.vision import ImageProcessor
from openrlhf.rollout.router import EngineClient, Router
from openrlhf.rollout.vllm.parsers import VllmParser


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """What an agent worker is made of. Files travel by content, so that they work on nodes without a shared disk.

    vision: whether the model takes images. reward_model: whether one scores what comes back without a reward.
    rewards_optional: such a sample has the reward 0.
    """

    tokenizer_path: str
    settings: EpisodeSettings
    vision: bool = False
    reward_model: bool = False
    rewards_optional: bool = False
    agent_file: CodeFile | None = None
    environments: EnvironmentTable | None = None
    rewards: RewardSpec = field(default_factory=RewardSpec)
    tracing: TraceTarget | None = None


class AgentActor:
    """Rolls groups out; the scalars go to the controller, the trajectories stay in the object store."""

    def __init__(
        self,
        spec: AgentSpec,
        engines: Sequence[Remote[EngineActor]],
        number: int,
        judges: Sequence[Remote[EngineActor]] = (),
    ) -> None:
        """judges: engines of a judge in the cluster."""
        self._spec = spec
        self._number = number
        self._router: Router | None = None
        self._loading = asyncio.Lock()
        self._clients = [RayEngineClient(engine) for engine in engines]
        self._judge_clients = _clients(judges, ())
        self._judges = Router(self._judge_clients, first=number)
        self._worker: AgentWorker | None = None
        self._rewards: RewardSources | None = None

    async def ready(self) -> None:
        """Load tokenizer, agent and reward function."""
        async with self._loading:
            if self._worker is None:
                end_when_stopped(os.getpid(), f"agent worker {self._number}")
                loaded = await build_worker(self._spec, self._clients, self._number, self._judges)
                self._worker, self._router, self._rewards = loaded.worker, loaded.router, loaded.rewards

    async def set_engines(self, engines: Sequence[Remote[EngineActor]]) -> None:
        """Use these engine actors from now on."""
        self._clients = _clients(engines, self._clients)
        if self._router is not None:
            self._router.set_clients(self._clients)

    async def set_judges(self, engines: Sequence[Remote[EngineActor]]) -> None:
        """Ask these engines of a judge from now on."""
        self._judge_clients = _clients(engines, self._judge_clients)
        self._judges.set_clients(self._judge_clients)

    async def judges_down(self) -> dict[str, str]:
        """Engines of a judge that this worker has given up, with the reason."""
        return self._judges.down()

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

    async def reward_totals(self) -> dict[str, float]:
        """What the reward sources counted since the start (`RewardSources.totals`)."""
        return {} if self._rewards is None else self._rewards.totals()

    async def shutdown(self) -> None:
        """End the reward functions' processes."""
        if self._worker is not None:
            await self._worker.close()


def _clients(engines: Sequence[Remote[EngineActor]], before: Sequence[RayEngineClient]) -> list[RayEngineClient]:
    """A client of each engine: that which it had before, if it had one."""
    known = {client.engine: client for client in before}
    return [known.get(engine) or RayEngineClient(engine) for engine in engines]


def _answer_parser(agent: AgentConfig, tokenizer: Any) -> VllmParser | None:
    """vLLM's parsers, where the flags name some."""
    if not (agent.tool_parser or agent.reasoning_parser):
        return None
    return VllmParser(tokenizer, agent.tool_parser or "", agent.reasoning_parser or "")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What an agent worker has loaded."""

    worker: AgentWorker
    router: Router
    rewards: RewardSources | None


async def build_worker(
    spec: AgentSpec, clients: Sequence[EngineClient], number: int, judges: Router | None = None
) -> Loaded:
    """Load everything an agent worker needs; an author's broken file raises here."""
    configure_logging(logging.WARNING, quiet=())
    keep_loopback_direct()
    start_tracing(spec.tracing, f"agent worker {number}")
    router = Router(clients, first=number)
    tokenizer = load_tokenizer(spec.tokenizer_path)
    source = await make_sources(spec.rewards, number, tokenizer.all_special_tokens, judges)
    executor: GroupExecutor
    if spec.environments is not None:
        executor = load_environments(spec.environments, source)
    else:
        executor = load_executor(spec.agent_file) if spec.agent_file else SingleTurnExecutor(source)
    worker = AgentWorker(
        executor,
        router,
        tokenizer,
        spec.settings,
        image_reader=ImageProcessor(spec.tokenizer_path) if spec.vision else None,
        on_blocked=exit_process,
        closers=[] if source is None else [source.close],
        parser=_answer_parser(spec.settings.agent, tokenizer),
    )
    await worker.start()
    return Loaded(worker=worker, router=router, rewards=source)
