"""The trainer's loop over a real agent worker in this process: prompts from files, a scripted engine, no learner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, GroupExecutor
from openrlhf.agents.environments import EnvironmentTable
from openrlhf.agents.testing import ByteTokenizer, ScriptedEngine
from openrlhf.agents.types import PromptItem
from openrlhf.agents.worker import AgentWorker
from openrlhf.launcher.data.prompts import load_prompts
from openrlhf.launcher.environments import sampler
from openrlhf.launcher.samples import EvalRequest, Group, sample_info
from openrlhf.launcher.trainer.loop import Trainer
from support.launcher_tokenizer import byte_tokenizer
from support.trainer_fakes import FakeRollout, FakeRun, fake_run


@dataclass
class WorkerRollout(FakeRollout):
    """Groups of an executor's episodes. The first answers take longest, so that groups finish in another order."""

    executor: GroupExecutor | None = None
    worker: AgentWorker | None = None
    groups: list[Group] = field(default_factory=list)

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        if self.worker is None:
            assert self.executor is not None
            settings = EpisodeSettings(n_samples=self.n, max_length=256, agent=AgentConfig(timeout=60.0))
            engine = ScriptedEngine(["yes", "no"], keep_requests=False)
            self.worker = AgentWorker(self.executor, engine, ByteTokenizer(), settings)
        for _ in range(item.position % 7 * 3):
            await asyncio.sleep(0)
        n = evaluation.n_samples_per_prompt if evaluation else None
        samples = await self.worker.run_group(item, evaluation=evaluation is not None, n_samples=n)
        version = {"min_version": self.weights.pushed[-1], "max_version": self.weights.pushed[-1]}
        infos = [replace(sample_info(s, max_len=256), **version) for s in samples]
        group = Group(prompt=item, samples=infos, handle=f"h{item.position}")
        self.groups.append(group)
        return group


def worker_run(executor: GroupExecutor, *, table: EnvironmentTable | None = None, **flags: Any) -> FakeRun:
    """`fake_run` with this executor and the prompts of `data.prompt_dataset`. table: of the executor's environments."""
    run = fake_run(0, **flags)
    run.rollout = WorkerRollout(n=run.rollout.n, weights=run.learner, log=run.learner.log, executor=executor)
    run.learner.busy = lambda: 0
    data, tokenizer = run.config.data, byte_tokenizer()
    evaluation = load_prompts(data, tokenizer, dataset=run.config.eval.dataset).items() if run.config.evaluates else []
    prompts = sampler(load_prompts(data, tokenizer, environments=table), run.config.train.seed, table)
    parts = replace(run.trainer.parts, rollout=run.rollout, prompts=prompts, eval_prompts=evaluation)
    run.trainer = Trainer(run.config, parts)
    return run
