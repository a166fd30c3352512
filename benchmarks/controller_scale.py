"""What the controller costs per step against the number of engines and ranks, which are simulated.

    python benchmarks/controller_scale.py [--sizes 8 32 128 512 1024] [--rounds 3]

The real trainer loop, group runner, batch plans, weight pushes, engine watch and router run over actors that answer by
a rule (`tests/support/simulated_cluster.py`), in simulated time: what remains is the controller's own work. Of N
engines the policy and the critic have N ranks, the reference N / 2, and there are N / 8 agent workers; a step trains on
N prompts of 4 samples. The router is one agent worker's that has all samples of a step. Bytes are those of pickled
arguments, a reference of 28 and an actor's handle of 1,000 bytes among them. Aim: at the largest size at most twice
what the smallest one, extrapolated linearly, says, and no more calls and bytes per engine than a tenth above it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.simulated_cluster import SimulatedRun, route

LIMITS = {"seconds": 2.0, "router": 2.0, "calls": 1.1, "nbytes": 1.1}
REPEATS = 64
"""Steps of the smallest size that make up a round, since one takes less than the clock can tell."""


def measure(size: int, smallest: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds, of a step."""
    seen = []
    for _ in range(rounds):
        step = SimulatedRun(size, steps=1 + max(2, REPEATS * smallest // size)).measure()
        seen.append(step | {"router": route(size)})
    return {name: median(one[name] for one in seen) for name in seen[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    logging.disable()
    smallest = min(args.sizes)
    found = {size: measure(size, smallest, args.rounds) for size in sorted(args.sizes)}
    print("| engines | CPU s | of linear | remote calls | of linear | MB | of linear | router CPU s | of linear |")
    print("|---|---|---|---|---|---|---|---|---|")
    failed = []
    for size, step in found.items():
        over = {name: step[name] / (found[smallest][name] * size / smallest) for name in LIMITS}
        failed += [f"{name} at {size}: {over[name]:.2f}" for name, limit in LIMITS.items() if over[name] > limit]
        cells = (
            f"{step['seconds']:.3f} | {over['seconds']:.2f} | {step['calls']:,.0f} | {over['calls']:.2f}",
            f"{step['nbytes'] / 1e6:.2f} | {over['nbytes']:.2f} | {step['router']:.3f} | {over['router']:.2f}",
        )
        print(f"| {size:,} | {' | '.join(cells)} |")
    assert not failed, f"above the limits: {failed}"


if __name__ == "__main__":
    main()
