"""The trainer's step against the bare sum of its parts, on the quickstart's model, in one run on the same processes.

Bare: 128 samples straight from the engine's actor, two optimiser steps on tensors that are already there, the weight
broadcast, the sync check; no agents, no rewards, no old log-probs, no advantages, no logging. The trainer's step does
all of that. Bare rounds run before and after the training steps, so that drift of the machine shows.

python benchmarks/step.py [--steps 40] [--rounds 20] [--limit 1.5] [--output out/quickstart]
Exit status 1 when the trainer's median step is more than `limit` times the bare median.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "quickstart"))

import run as quickstart

if TYPE_CHECKING:
    from openrlhf.agents.engine import Generation
    from openrlhf.launcher.config import TrainPPOConfig
    from openrlhf.launcher.preflight import Prepared
    from openrlhf.launcher.ray.engine_fleet import EngineFleet
    from openrlhf.launcher.ray.rank_group import RankGroup
    from openrlhf.launcher.samples import SampleRef

TIMEOUT = 300.0
PHASES = ("generation", "update", "push", "check")
TRAINER_PHASES = ("generation", "make_experience", "ppo_train", "broadcast", "sync_check", "step_total")


@dataclass
class Timings:
    """Seconds per phase, one entry per round or step."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, phase: str, value: float) -> None:
        self.seconds.setdefault(phase, []).append(value)

    @contextmanager
    def timed(self, phase: str):
        began = time.perf_counter()
        yield
        self.add(phase, time.perf_counter() - began)

    def median(self, phase: str) -> float:
        return statistics.median(self.seconds[phase])

    def rounds(self) -> list[float]:
        """Total of each bare round."""
        return [sum(parts) for parts in zip(*(self.seconds[p] for p in PHASES), strict=True)]


@dataclass
class MetricList:
    """A sink that keeps the trainer's own timing metrics."""

    timings: Timings = field(default_factory=Timings)
    run_id: str = "benchmark"

    def resume(self, step: int) -> None:
        """A benchmark is never resumed."""

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        for phase in TRAINER_PHASES:
            if f"timing/{phase}" in metrics:
                self.timings.add(phase, metrics[f"timing/{phase}"])

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Evaluations are no steps."""

    def log_samples(self, step: int, samples: Sequence[object]) -> None:
        """Not kept."""


class Bare:
    """The mechanism alone, driven straight through the actors."""

    def __init__(self, config: TrainPPOConfig, prepared: Prepared, fleet: EngineFleet, policy: RankGroup) -> None:
        self.config = config
        self.fleet = fleet
        self.policy = policy
        self.timings = Timings()
        self.version = 0
        items = prepared.prompts.items()[: config.rollout.batch_size]
        self.prompts = [prepared.tokenizer.encode(item.prompt, add_special_tokens=False) for item in items]
        self.plan: Any = None
        self.batch: list[Any] = []
        from openrlhf.rollout.sync_check import check_sequences

        self.check_rows = check_sequences(prepared.vocab_size)

    async def rounds(self, count: int) -> None:
        """`count` rounds of all four phases; the first of a series only warms up."""
        from openrlhf.launcher.ranks.roles import PolicyRank
        from openrlhf.launcher.ray.learner_actor import LearnerActor
        from openrlhf.launcher.ray.remote import ask_all
        from openrlhf.rollout.engine import EngineControl

        if self.plan is None:
            self.plan = (
                await self._on_ranks(self.policy.ask_process(LearnerActor.plan_push, 64 << 20, False, "merged"))
            )[0]
        for number in range(count + 1):
            timings = self.timings if number else Timings()
            with timings.timed("generation"):
                generations = await self.generate()
            await self.load(generations)
            with timings.timed("update"):
                await self._on_ranks(self.policy.scatter(PolicyRank.update, self.batch, [0, 1], kl_coef=0.0))
            with timings.timed("push"):
                await self.push()
            with timings.timed("check"):
                await asyncio.gather(
                    ask_all(self.fleet.engines, "sync check", TIMEOUT, EngineControl.score, self.check_rows),
                    self._on_ranks(self.policy.ask(PolicyRank.check_logprobs, self.check_rows)),
                )

    async def generate(self) -> dict[int, Generation]:
        """All samples of a rollout batch in one message to the engine."""
        from openrlhf.agents.engine import SamplingParams
        from openrlhf.launcher.ray.engine_actor import EngineActor
        from openrlhf.rollout.requests import GenerateRequest

        n = self.config.rollout.n_samples_per_prompt
        requests = [
            GenerateRequest(
                request_id=f"bare-{self.version}-{i}",
                token_ids=ids,
                sampling=SamplingParams(max_tokens=self.config.rollout.max_new_tokens, seed=self.version * 10_000 + i),
                group_id=str(i // n),
            )
            for i, ids in enumerate(ids for ids in self.prompts for _ in range(n))
        ]
        out: dict[int, Any] = {}
        async for ref in self.fleet.engines[0].stream(EngineActor.generate_many, requests):
            out.update(dict(await ref))
        return out

    async def load(self, generations: dict[int, Generation]) -> None:
        """Hand the samples to the learner, not timed. Reward 0 makes every advantage 0, so the weights stay as they
        are while the update costs what it always costs.
        """
        import ray

        from openrlhf.launcher.ranks.roles import PolicyRank
        from openrlhf.launcher.trainer.plan import cut_mini_batches

        n = self.config.rollout.n_samples_per_prompt
        trajectories = [as_trajectory(self.prompts[i // n], generations[i]) for i in range(len(generations))]
        handle = ray.put(trajectories)
        refs = as_refs(handle, trajectories)
        batches = cut_mini_batches(refs, batch_size=self.config.train.batch_size, seed=0, step=self.version)
        shares = self.policy.shares(batches)
        self.batch = await self._on_ranks(self.policy.scatter(PolicyRank.prepare, shares, scores={}, kl_coef=0.0))

    async def push(self) -> None:
        from openrlhf.launcher.ray.learner_actor import LearnerActor
        from openrlhf.launcher.ray.remote import ask_all
        from openrlhf.rollout.engine import EngineControl

        self.version += 1
        await asyncio.gather(
            ask_all(self.fleet.engines, "push", TIMEOUT, EngineControl.receive_weights, self.plan, self.version),
            self._on_ranks(self.policy.ask_process(LearnerActor.push, self.version)),
        )

    async def _on_ranks(self, refs: Sequence[Any]) -> list[Any]:
        return await self.policy.wait(refs, "bare step", TIMEOUT)


def as_trajectory(prompt: list[int], generation: Generation) -> Any:
    """A prompt and its answer as one training sample."""
    from openrlhf.agents.types import StopReason, Trajectory, Turn

    start, end = len(prompt), len(prompt) + len(generation.token_ids)
    return Trajectory(
        token_ids=[*prompt, *generation.token_ids],
        trainable=[0] * start + [1] * (end - start),
        logprobs=[0.0] * start + list(generation.logprobs),
        versions=[-1] * start + list(generation.versions),
        prompt_length=start,
        turns=[Turn(start=start, end=end, finish_reason=generation.finish_reason)],
        stop_reason=StopReason.STOP,
        group_id="bare",
        sample_index=0,
    )


def as_refs(handle: Any, trajectories: Sequence[Any]) -> list[SampleRef]:
    """References to all samples behind one handle, with reward 0."""
    from openrlhf.launcher.samples import SampleRef

    return [
        SampleRef(handle=handle, position=i, index=i, reward=0.0, length=len(t.token_ids))
        for i, t in enumerate(trajectories)
    ]


def configure(paths: quickstart.Paths, steps: int) -> TrainPPOConfig:
    """The quickstart's own configuration, without evaluation."""
    from openrlhf.launcher.command_line import prepare
    from openrlhf.launcher.commands import TRAIN_PPO_RAY
    from openrlhf.launcher.machine import detect_machine

    train_data, eval_data = quickstart.prepare(paths, steps)
    command = quickstart.train_command(paths, train_data, eval_data, ["--eval.steps", "-1"])
    return prepare(TRAIN_PPO_RAY, command[3:], detect_machine())[0]


async def measure(config: TrainPPOConfig, prepared: Prepared, cluster: Any, rounds: int) -> tuple[Timings, Timings]:
    """Start the stack once; bare rounds, the whole training, bare rounds again."""
    from openrlhf.launcher.ray.start import start_parts
    from openrlhf.launcher.trainer.loop import Trainer

    sink = MetricList()
    parts = await start_parts(config, prepared, cluster, sink)
    learner: Any = parts.learner
    try:
        await learner.push_weights(0)
        bare = Bare(config, prepared, learner._push._fleet, learner.policy)
        await bare.rounds(rounds // 2)
        await Trainer(config, parts).run()
        await bare.rounds(rounds - rounds // 2)
        return bare.timings, sink.timings
    finally:
        await parts.rollout.shutdown()
        await parts.learner.shutdown()


def print_report(bare: Timings, trainer: Timings, limit: float) -> bool:
    """The table; True when the ratio is within the limit."""
    sum_of_parts = statistics.median(bare.rounds())
    steps = trainer.seconds["step_total"][1:]  # the first one warms up
    step = statistics.median(steps)
    print(f"\n{'bare, median of ' + str(len(bare.rounds())):<34}seconds")
    for phase in PHASES:
        print(f"  {phase:<32}{bare.median(phase):.3f}")
    print(f"  {'sum of a round':<32}{sum_of_parts:.3f}")
    print(f"{'trainer, median of ' + str(len(steps)):<34}seconds")
    for phase in TRAINER_PHASES:
        if phase in trainer.seconds:
            print(f"  {phase:<32}{statistics.median(trainer.seconds[phase][1:]):.3f}")
    ratio = step / sum_of_parts
    print(f"trainer / bare = {ratio:.2f} (limit {limit:g}), load average {os.getloadavg()[0]:.1f}")
    return ratio <= limit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="rollout steps of the trainer")
    parser.add_argument("--rounds", type=int, default=20, help="bare rounds, half before and half after")
    parser.add_argument("--limit", type=float, default=1.5, help="largest ratio that passes")
    parser.add_argument("--output", type=Path, default=Path("out/quickstart"), help="where the warm start lies")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = configure(quickstart.Paths(output=args.output.resolve(), seed=1, name="benchmark"), args.steps)
    from openrlhf.launcher.preflight import prepare
    from openrlhf.launcher.ray.cluster import connect

    prepared = prepare(config)
    cluster = connect()
    try:
        bare, trainer = asyncio.run(measure(config, prepared, cluster, args.rounds))
    finally:
        cluster.close()
    return 0 if print_report(bare, trainer, args.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
