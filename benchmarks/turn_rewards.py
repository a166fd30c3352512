"""Episodes until a policy succeeds, with a reward per turn against one reward per episode.

    python benchmarks/turn_rewards.py [--turns 2 8] [--estimator group_norm]

A table is the policy; rewards, credit, advantages, losses and steps are the production code. Every turn begins with a
token of its own and earns 1 for one right token of 16: so with one reward what the other turns earned is noise. The
success of the table is computed exactly, after every step; a run ends at 0.9. Three seeds at each of several learning
rates, the same for all ways of credit. Aim: at its best rate each way of credit needs no more episodes than one reward,
and fewer with more than two turns.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.toy_turns import train_turns

MODES = ("off", "to_go", "each")
RATES = (4.0, 16.0, 64.0, 256.0)
SEEDS = (0, 1, 2)


def episodes(turns: int, mode: str, rate: float, estimator: str, limit: int) -> list[int]:
    """Of one way of credit at one learning rate, per seed."""
    flags = {"algo.turn_rewards": mode, "algo.advantage.estimator": estimator, "rollout.batch_size": 1}
    return [train_turns(turns, vocabulary=16, seed=seed, lr=rate, limit=limit, **flags) for seed in SEEDS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--estimator", default="group_norm")
    parser.add_argument("--limit", type=int, default=3000, help="episodes after which a run is given up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    met = True
    for turns in options.turns:
        best: dict[str, float] = {}
        for mode in MODES:
            for rate in RATES:
                found = episodes(turns, mode, rate, options.estimator, options.limit)
                best[mode] = min(best.get(mode, float("inf")), statistics.fmean(found))
                print(f"{turns} turns, {options.estimator}, {mode:5}, rate {rate:5g}: episodes {found}", flush=True)
        told = ", ".join(f"{mode} {count:.0f}" for mode, count in best.items())
        print(f"{turns} turns: mean episodes at the best rate: {told}")
        for mode in MODES[1:]:
            met &= best[mode] < best["off"] if turns > 2 else best[mode] <= best["off"]
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
