"""Row `generation`: tokens per second on the way that a run's samples go, beside the same engine without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from openrlhf.agents.context import EpisodeSettings, GroupContext
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.executor import SingleTurnExecutor
from openrlhf.agents.sampling import sample_seed
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.ray.calls import get
from openrlhf.launcher.ray.cluster import connect
from openrlhf.launcher.ray.engine_actor import GENERATION, EngineActor, engine_actor
from openrlhf.launcher.ray.engine_client import RayEngineClient
from openrlhf.launcher.ray.remote import Remote, in_group
from openrlhf.launcher.selfcheck.learning import dtype
from openrlhf.launcher.selfcheck.models import END, TINY, WIDE_ON_GPU, make_model
from openrlhf.launcher.selfcheck.outcome import CheckError, Outcome
from openrlhf.learner.setup import training_device
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.router import Router
from openrlhf.rollout.vllm.bare import bare_seconds
from openrlhf.rollout.vllm.engine import VllmEngine

START_TIMEOUT = 400.0
CALL_TIMEOUT = 120.0
ROUNDS = 3
"""Of each way; the first warms up, the best of the others counts."""
LEAST_SHARE = 0.3
"""Of the bare speed. The tiny model of a CPU is answered faster than asked; a large one loses a few per cent."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is generated."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @property
    def texts(self) -> list[str]:
        """Different prompts of one letter per token."""
        return ["".join(chr(97 + (7 * i + j) % 26) for j in range(self.prompt_tokens)) for i in range(self.prompts)]

    @property
    def total(self) -> int:
        """Tokens to sample."""
        return self.prompts * self.samples * self.new_tokens


ON_CPU = Load(prompts=8, samples=4, prompt_tokens=16, new_tokens=32)
ON_GPU = Load(prompts=128, samples=8, prompt_tokens=64, new_tokens=128)


class Letters:
    """A tokenizer for the random model: one token per letter."""

    eos_token_id: int | None = END

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids beyond those of special tokens."""
        del add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The inverse."""
        del skip_special_tokens
        return "".join(map(chr, token_ids))


class MeasuredActor(EngineActor):
    """A run's engine actor; its engine can also be asked without anything of ours."""

    @in_group(GENERATION)
    async def bare(self, load: Load, first_seed: int) -> float:
        """Seconds that vLLM itself takes, called in its own process."""
        rows = [Letters().encode(text) for text in load.texts for _ in range(load.samples)]
        return await bare_seconds(cast(VllmEngine, self.engine), rows, load.new_tokens, first_seed)


def generation(folder: Path) -> Outcome:
    """An engine actor on a Ray of its own, asked in both ways."""
    cuda = training_device().type == "cuda"
    load, shape = (ON_GPU, WIDE_ON_GPU) if cuda else (ON_CPU, TINY)
    spec = EngineSpec(
        model=make_model(folder / "model", shape, dtype=dtype()),
        name="the engine",
        dtype="bfloat16" if cuda else "float32",
        device="cuda" if cuda else "cpu",
        max_model_len=512,
        gpu_memory_utilization=0.5,
    )
    cluster = connect()
    try:
        env = cluster.worker_environment() | VllmEngine.environment(spec)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": int(cuda), "runtime_env": {"env_vars": env}}
        engine = Remote[MeasuredActor]("the engine", engine_actor(MeasuredActor).options(**options).remote())
        get([engine.ask(MeasuredActor.start, spec, serve=True)], what="engine start", timeout=START_TIMEOUT)
        bare = [_bare(engine, load, number) for number in range(ROUNDS)]
        ours = asyncio.run(_whole_path(engine, load))
        get([engine.ask(MeasuredActor.shutdown)], what="engine end", timeout=CALL_TIMEOUT)
    finally:
        cluster.close()
    return _compared(load.total / min(bare[1:]), load.total / min(ours[1:]))


def _bare(engine: Remote[MeasuredActor], load: Load, number: int) -> float:
    ref = engine.ask(MeasuredActor.bare, load, number * load.total)
    return get([ref], what="generation by vLLM alone", timeout=CALL_TIMEOUT)[0]


def _compared(bare: float, ours: float) -> Outcome:
    share = ours / bare
    detail = f"{ours:,.0f} tokens/s through executor, router and Ray, {share:.0%} of the bare engine's {bare:,.0f}"
    if share < LEAST_SHARE:
        raise CheckError(detail)
    return Outcome(detail=detail, numbers={"tokens_per_s": ours, "bare_tokens_per_s": bare, "share": share})


async def _whole_path(engine: Remote[MeasuredActor], load: Load) -> list[float]:
    """Seconds of each round."""
    router = Router([RayEngineClient(cast(Remote[EngineActor], engine))])
    try:
        return [await _round(router, load, number) for number in range(ROUNDS)]
    finally:
        await router.close()


async def _round(router: Router, load: Load, number: int) -> float:
    settings = EpisodeSettings(
        n_samples=load.samples,
        sampling=SamplingParams(ignore_eos=True),
        max_length=load.prompt_tokens + load.new_tokens + 1,
        max_new_tokens=load.new_tokens,
    )
    context = GroupContext(
        engine=router,
        tokenizer=Letters(),
        settings=settings,
        seeds=lambda sample, turn: sample_seed(number, False, 0, 0, sample, turn),
    )
    items = [PromptItem(group_id=f"{number}-{i}", prompt=text, position=i) for i, text in enumerate(load.texts)]
    executor = SingleTurnExecutor()
    began = time.perf_counter()
    groups = await asyncio.gather(*(executor.run_group(item, context) for item in items))
    took = time.perf_counter() - began
    samples = [sample for group in groups for sample in group]
    failed = [sample.failure for sample in samples if sample.failure]
    if failed:
        raise CheckError(f"{len(failed)} of {len(samples)} samples failed, the first: {failed[0].message}")
    sampled = sum(sample.num_trainable for sample in samples)
    if sampled != load.total:
        raise CheckError(f"{sampled} tokens in the samples, {load.total} were asked for")
    return took
