"""Groups are in a batch before they are too old, whatever finishes when, and nothing is thrown away."""

from __future__ import annotations

import asyncio
import random

import pytest

from openrlhf.rollout.groups import GroupRules, GroupRunner, Pacing
from support.rollout_fakes import FakeGroup, ScriptedRollout, group


def test_room_is_that_of_the_batches_up_to_the_deadline() -> None:
    pacing = Pacing(batch_size=2, max_staleness=1)
    assert [pacing.may_start(n) for n in (0, 3, 4)] == [True, True, False]
    pacing.close_batch()
    assert [pacing.may_start(n) for n in (1, 2)] == [True, False]
    pacing.close_batch()
    assert not pacing.may_start(0)
    pacing.advance()
    assert pacing.may_start(1)


def test_nothing_starts_for_batches_after_the_last() -> None:
    pacing = Pacing(batch_size=2, max_staleness=3)
    pacing.limit(0)
    assert [pacing.may_start(n) for n in (1, 2)] == [True, False]


def test_staleness_0_is_synchronous() -> None:
    pacing = Pacing(batch_size=2, max_staleness=0)
    pacing.close_batch()
    assert not pacing.may_start(0)
    pacing.advance()
    assert pacing.may_start(0)


def test_fits() -> None:
    pacing = Pacing(batch_size=2, max_staleness=2)
    assert pacing.fits([0, 0, 1, 1])
    assert not pacing.fits([0, 0, 0])
    assert not pacing.fits([1, 1, 0], first=1)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("in_flight", [2, 4, 9])
@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_too_old_and_none_is_lost(staleness: int, in_flight: int, seed: int) -> None:
    rng = random.Random(seed)
    pacing = Pacing(batch_size=4, max_staleness=staleness)
    version, started, ages, used = 0, {}, [], []
    rollout = ScriptedRollout(lambda p: group(p, 0.5), pauses=rng)

    async def run_group(prompt: int) -> FakeGroup:
        started[prompt] = version
        return await rollout(prompt)

    async def main() -> None:
        nonlocal version
        rules = GroupRules(batch_size=4, in_flight=in_flight, by_arrival=True)
        runner = GroupRunner(range(50), run_group, rules, pacing=pacing)
        queue: asyncio.Queue[list[FakeGroup]] = asyncio.Queue()

        async def generate() -> None:
            while groups := (await runner.next_batch()).groups:
                queue.put_nowait(groups)
            queue.put_nowait([])

        task = asyncio.create_task(generate())
        while groups := await queue.get():
            for _ in range(rng.randint(0, 30)):
                await asyncio.sleep(0)
            ages.extend(version - started[g.prompt] for g in groups)
            used.extend(g.prompt for g in groups)
            version += 1
            pacing.advance()
        await task

    asyncio.run(asyncio.wait_for(main(), 10))
    assert sorted(used) == list(range(50))
    assert max(ages) <= staleness
