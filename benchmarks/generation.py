"""Generation through the whole path against bare vLLM, the same prompts and sampling, one after the other on CPU.

    python benchmarks/generation.py [--prompts 64] [--samples 4] [--tokens 128] [--layers 30] [--quick]

With --quick: 16 prompts, 8 samples of 10 tokens, 1 layer: two minutes instead of 25, most of them start-up.

Whole path: single-turn executor, router, client, Ray actor, `VllmEngine`, checked log-probs, trajectories. Bare:
`vllm.LLM.generate` in a process of its own with the same engine settings. Aim: >= 90 % of the bare tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
from weight_sync import make_model

from openrlhf.agents.context import EpisodeSettings, GroupContext
from openrlhf.agents.engine import SamplingParams
from openrlhf.agents.executor import SingleTurnExecutor
from openrlhf.agents.sampling import sample_seed
from openrlhf.agents.types import PromptItem
from openrlhf.launcher.ray.cluster import connect
from openrlhf.launcher.ray.engine_actor import EngineActor, engine_actor
from openrlhf.launcher.ray.engine_client import RayEngineClient
from openrlhf.launcher.ray.remote import Remote
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.router import Router
from openrlhf.rollout.vllm.arguments import environment, vllm_args

ROUNDS = 5
PROMPT_TOKENS = 24


class Letters:
    """The tokenizer of the random model: one token per character."""

    eos_token_id: int | None = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(t) for t in token_ids)


def prompts(count: int) -> list[str]:
    """Different prompts of PROMPT_TOKENS letters."""
    return ["".join(chr(97 + (i * 7 + j * (1 + i % 5)) % 26) for j in range(PROMPT_TOKENS)) for i in range(count)]


def bare(spec: EngineSpec, args: argparse.Namespace, pipe: Connection) -> None:
    """Tokens per second of each round of vllm.LLM.generate."""
    for name, value in environment(spec).items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    llm = LLM(**vllm_args(spec))
    inputs: list[Any] = [{"prompt_token_ids": Letters().encode(p)} for p in prompts(args.prompts)]
    for number in range(ROUNDS + 1):
        params = VllmSamplingParams(
            n=args.samples, max_tokens=args.tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=number * 10**6
        )
        began = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        pipe.send(sum(len(o.token_ids) for r in outputs for o in r.outputs) / seconds)


def run_bare(spec: EngineSpec, args: argparse.Namespace) -> list[float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=bare, args=(spec, args, theirs))
    process.start()
    theirs.close()
    speeds = [ours.recv() for _ in range(ROUNDS + 1)]
    process.join()
    return speeds[1:]


async def run_path(engine: Remote[EngineActor], args: argparse.Namespace) -> list[float]:
    """Tokens per second of each round through executor, router and actor."""
    router = Router([RayEngineClient(engine)])
    executor = SingleTurnExecutor()
    speeds = []
    for number in range(ROUNDS + 1):
        ctx = GroupContext(
            engine=router,
            tokenizer=Letters(),
            settings=EpisodeSettings(
                n_samples=args.samples,
                sampling=SamplingParams(ignore_eos=True),
                max_length=PROMPT_TOKENS + args.tokens + 1,
                max_new_tokens=args.tokens,
            ),
            seeds=lambda sample, turn, number=number: sample_seed(number, False, 0, 0, sample, turn),
        )
        items = [
            PromptItem(group_id=f"{number}-{i}", prompt=p, position=i) for i, p in enumerate(prompts(args.prompts))
        ]
        began = time.perf_counter()
        groups = await asyncio.gather(*(executor.run_group(item, ctx) for item in items))
        seconds = time.perf_counter() - began
        failed = [t.failure for g in groups for t in g if t.failure]
        if failed:
            raise RuntimeError(f"{len(failed)} samples failed, the first: {failed[0].message}")
        speeds.append(sum(t.num_trainable for g in groups for t in g) / seconds)
    await router.close()
    return speeds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 64), ("samples", 4), ("tokens", 128), ("layers", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.samples, args.tokens, args.layers = 16, 8, 10, 1
    with tempfile.TemporaryDirectory() as path:
        make_model(path, args.layers)
        spec = EngineSpec(model=path, max_model_len=512, max_num_seqs=256)
        plain = run_bare(spec, args)
        print(f"bare vllm.LLM     {statistics.median(plain):9.0f} tokens/s  {[round(s) for s in plain]}", flush=True)
        cluster = connect()
        try:
            env = cluster.worker_environment() | environment(spec)
            actor = engine_actor().options(num_cpus=0, runtime_env={"env_vars": env}).remote()
            engine: Remote[EngineActor] = Remote(spec.name, actor)
            ray.get(engine.ask(EngineActor.start, spec, serve=True), timeout=600)
            ours = asyncio.run(run_path(engine, args))
            ray.get(engine.ask(EngineActor.shutdown), timeout=60)
        finally:
            cluster.close()
    print(f"whole path        {statistics.median(ours):9.0f} tokens/s  {[round(s) for s in ours]}")
    print(f"whole path / bare = {statistics.median(ours) / statistics.median(plain):.3f} (aim >= 0.9)")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
