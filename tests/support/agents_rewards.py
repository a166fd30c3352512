"""Reward files in their processes: a pool around a file, one call of it, and whether a process is alive."""

import asyncio
import os
import textwrap
import time

from openrlhf.agents.files import CodeFile
from openrlhf.agents.reward_process import RewardPool


def code_of(source):
    """A reward file that lies on no disk."""
    return CodeFile(path="/nowhere/my_reward.py", source=textwrap.dedent(source))


def with_pool(code, body, timeout=5.0, processes=1, max_memory=None):
    async def main():
        pool = RewardPool(code, timeout, processes, max_memory)
        try:
            return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def score(pool, labels):
    n = len(labels)
    return pool.score(["qa"] * n, ["q"] * n, labels, responses=["a"] * n)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().split(")")[1].split()[0] != "Z"


def ends(pid):
    deadline = time.monotonic() + 5.0
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)
