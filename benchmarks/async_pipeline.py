"""How well sampling and training overlap in the asynchronous pipeline, in simulated time.

    python benchmarks/async_pipeline.py [--batches 60] [--sigma 0.6]

The real trainer loop runs on a rollout whose samples take log-normal times and a learner whose step takes a fixed
time; the clock jumps from event to event. Every line compares a run with the sum over its batches of max(generation,
training): generation is that of the batch in the synchronous pipeline. Aim at staleness 1: at most 5 % above,
staleness never above the bound, no token sampled and not trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.samples import EvalRequest, Group
from support.simulated_time import SimulatedLoop
from support.trainer_fakes import FakeLearner, FakeRollout, FakeRun, fake_run, half_right

BATCH, SAMPLES = 32, 8


class SlowRollout(FakeRollout):
    """A group takes as long as its slowest sample; the mean of a sample is 1 s."""

    sigma = 0.6

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        self.calls.append((item.position, False))
        rng = random.Random(item.position)
        first = self.weights.pushed[-1]
        self.running += 1
        await asyncio.sleep(max(rng.lognormvariate(-self.sigma * self.sigma / 2, self.sigma) for _ in range(self.n)))
        self.running -= 1
        samples = [replace(half_right(item, i), min_version=first) for i in range(self.n)]
        return Group(prompt=item, samples=samples, handle=f"h{item.position}")


class SlowLearner(FakeLearner):
    """A step takes `seconds`."""

    seconds = 0.0

    async def update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        return await super().update(*args, **kwargs)


def simulate(batches: int, seconds: float, sigma: float, **flags: Any) -> tuple[list[float], FakeRun]:
    """Simulated seconds at which every step of a whole run ended."""
    learner = SlowLearner()
    learner.seconds = seconds
    settings = {
        "rollout.batch_size": BATCH,
        "rollout.n_samples_per_prompt": SAMPLES,
        "train.batch_size": BATCH * SAMPLES,
    }
    run = fake_run(batches * BATCH, learner=learner, **settings, **flags)
    rollout = SlowRollout(n=SAMPLES, weights=learner)
    rollout.sigma = sigma
    learner.busy = lambda: rollout.running
    pipeline: Any = run.trainer.pipeline
    pipeline._rollout = rollout
    run.rollout = rollout
    loop = SimulatedLoop()
    ends: list[float] = []
    log_step = run.sink.log_step
    run.sink.log_step = lambda *args: (ends.append(loop.time()), log_step(*args))[1]  # type: ignore[method-assign]
    try:
        loop.run_until_complete(run.trainer.run())
        return ends, run
    finally:
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--sigma", type=float, default=0.6)
    args = parser.parse_args()
    ends, _ = simulate(args.batches, 0.0, args.sigma)
    generation = [end - start for start, end in itertools.pairwise([0.0, *ends])]
    print(f"{args.batches} batches, generation {sum(generation) / len(generation):.2f} s each")
    print("pipeline  in flight  training s  bound s  run s  above the bound  staleness  untrained samples")
    for partial in (False, True):
        for in_flight in (BATCH, 2 * BATCH):
            for ratio in (0.5, 1.0, 2.0):
                step = ratio * sum(generation) / len(generation)
                flags = {"train.partial_rollout_enable": partial, "rollout.vllm_generate_batch_size": in_flight}
                ends, run = simulate(args.batches, step, args.sigma, **{"train.async_enable": True}, **flags)
                bound = sum(max(g, step) for g in generation)
                age = max(metrics["rollout/staleness_max"] for metrics in run.sink.steps)
                lost = len(run.rollout.calls) * SAMPLES - len(run.trained())
                assert age <= 1, f"staleness {age}"
                assert lost == 0, f"{lost} samples were not trained on"
                name, took = "partial" if partial else "async", ends[-1]
                assert took <= 1.05 * bound, f"{took / bound - 1:.1%} above the bound"
                times = f"{step:10.2f}  {bound:7.1f}  {took:5.1f}  {took / bound - 1:15.1%}"
                print(f"{name:8}  {in_flight:9}  {times}  {age:9.0f}  {lost:17}")


if __name__ == "__main__":
    main()
