"""How reward calls spread over several processes: groups per second of four against one.

    python benchmarks/reward_processes.py [--groups 80] [--milliseconds 50]

A reward function that sleeps (so that two cores suffice for any number of processes) is called for many groups at the
same time, as agent workers do it. Fails when a reward is wrong, or below 3.5 times as many groups with four processes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from openrlhf.agents.files import CodeFile
from openrlhf.agents.reward_process import RewardPool

AIM = 3.5
ROUNDS = 3
TIMEOUT = 60.0
SOURCE = """
import time
def reward_func(queries, prompts, labels):
    time.sleep(float(labels[0]))
    return [float(prompt) for prompt in prompts]
"""


async def groups_per_second(processes: int, groups: int, seconds: float) -> float:
    """The median over the rounds; the processes have started before."""
    pool = RewardPool(CodeFile(path="/reward.py", source=SOURCE), TIMEOUT, processes)

    async def score(group: int) -> None:
        result = await pool.score(["q"] * 4, [str(group)] * 4, [str(seconds)] * 4)
        assert result.rewards == [float(group)] * 4, f"group {group} got {result.rewards}"

    rates = []
    try:
        for _ in range(1 + ROUNDS):
            began = time.perf_counter()
            await asyncio.gather(*(score(group) for group in range(groups)))
            rates.append(groups / (time.perf_counter() - began))
    finally:
        await pool.close()
    return statistics.median(rates[1:])


def main() -> int:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=80)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    options = parser.parse_args()
    one, four = (asyncio.run(groups_per_second(n, options.groups, options.milliseconds / 1e3)) for n in (1, 4))
    print(f"groups per second: {one:.1f} with one process, {four:.1f} with four; ratio {four / one:.2f} (aim {AIM})")
    return 0 if four >= AIM * one else 1


if __name__ == "__main__":
    sys.exit(main())
