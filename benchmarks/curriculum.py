"""Episodes until a policy solves prompts of all difficulties, drawn by their pass rate against drawn uniformly.

    python benchmarks/curriculum.py [--rates 32]

A table is the policy; the trainer, its pipeline, rewards, losses and steps are the production code. A prompt asks for
the 1, 2, 4 or 8 tokens that follow a token in a hidden order of 16, and is right only as a whole: the short ones are
soon solved, the long ones are hopeless at first, and what is learned on one serves the others. The success over all
64 prompts is computed exactly, after every step; a run ends at 0.9. Three seeds at every learning rate. Aim: chosen
prompts need fewer episodes than uniform ones, for every seed. Then what a curriculum over a million prompts costs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from openrlhf.launcher.data.curriculum import CurriculumSampler
from openrlhf.launcher.data.curriculum_config import CurriculumConfig
from openrlhf.launcher.environments import sampler
from support.toy_turns import Tasks, train_chains
from support.trainer_fakes import GOOD

KINDS = ("uniform", "window", "prioritised")
SEEDS = (0, 1, 2)


def episodes(kind: str, rate: float, limit: int) -> list[int]:
    """Of one way to draw prompts at one learning rate, per seed."""

    def order(tasks: Any, config: CurriculumConfig, seed: int) -> Any:
        return sampler(tasks, seed, None, config)

    flags = {"data.curriculum": kind, "algo.advantage.estimator": "rloo", "rollout.batch_size": 8}
    return [train_chains(order, vocabulary=16, seed=seed, lr=rate, limit=limit, **flags) for seed in SEEDS]


class Many(Tasks):
    """A million prompts."""

    def __init__(self) -> None:
        super().__init__([])

    def __len__(self) -> int:
        return 1_000_000

    def item(self, index: int, **place: Any) -> Any:
        return replace(Tasks([(0, 1)]).item(0, **place), group_id=f"p{index}")


def cost() -> None:
    """Time and memory of a million prompts, all of them tried."""
    it = CurriculumSampler(Many(), CurriculumConfig(curriculum="prioritised"), seed=0)
    size = len(it.dataset)
    half = np.full(size, 4.0)
    it.histories.take(np.arange(size), 2 * half, half, now=1, half_life=20.0)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for item in it.next(128):
            it.seen(item, [GOOD])
        it.settle()
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    state = it.state_dict()
    saved = sum(map(len, state["curriculum"]["histories"].values())) / 2**20
    took = time.perf_counter() - began
    print(
        f"a million prompts: {statistics.median(seconds):.2f} s per rollout batch of 128, {it.nbytes / size:.0f} bytes "
        f"each; a checkpoint's part {saved:.0f} MiB in {took:.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[32.0])
    parser.add_argument("--limit", type=int, default=40_000, help="episodes after which a run is given up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    met = True
    for rate in options.rates:
        found = {}
        for kind in KINDS:
            found[kind] = episodes(kind, rate, options.limit)
            mean = statistics.fmean(found[kind])
            print(f"rate {rate:g}, {kind:11}: episodes {found[kind]}, mean {mean:.0f}", flush=True)
        for kind in KINDS[1:]:
            met &= all(a < b for a, b in zip(found[kind], found["uniform"], strict=True))
    cost()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
