from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable, Mapping, Sequence

import pytest

from openrlhf.rollout.episodes import group_score
from openrlhf.rollout.failure_share import RolloutFailedError
from openrlhf.rollout.groups import (
    GroupRules,
    GroupRunner,
    GroupStats,
    Pacing,
    RolloutBatch,
    score_histogram,
)
from support.rollout_fakes import FakeGroup, FakeSample, ScriptedRollout, group

A, B, C = 0, 1, 2


def numbers(batch: RolloutBatch[FakeGroup]) -> list[int]:
    return [g.prompt for g in batch.groups]


def run(
    prompts: Iterable[int], rollout: ScriptedRollout, rules: GroupRules, batches: int
) -> list[RolloutBatch[FakeGroup]]:
    async def main() -> list[RolloutBatch[FakeGroup]]:
        runner: GroupRunner[int, FakeGroup] = GroupRunner(prompts, rollout, rules)
        return [await runner.next_batch() for _ in range(batches)]

    return asyncio.run(asyncio.wait_for(main(), 10))


def scores(table: Mapping[int, Sequence[float | None]]) -> ScriptedRollout:
    return ScriptedRollout(lambda p: group(p, *table[p]))


def test_last_batch_is_smaller_and_used() -> None:  # B049
    batches = run(range(5), ScriptedRollout(lambda p: group(p, 1.0)), GroupRules(batch_size=2), 4)
    assert [numbers(b) for b in batches] == [[0, 1], [2, 3], [4], []]
    assert [b.exhausted for b in batches] == [False, False, True, True]


def test_one_prompt_and_a_larger_batch() -> None:  # B049
    (batch,) = run([7], ScriptedRollout(lambda p: group(p, 1.0)), GroupRules(batch_size=2), 1)
    assert (numbers(batch), batch.exhausted) == ([7], True)


@pytest.mark.parametrize("order", [(A, B, C), (B, A, C), (C, B, A)])
def test_accepted_groups_survive_the_end_of_the_prompts(order: tuple[int, ...]) -> None:  # B050
    table = {A: [0.0, 1.0], B: [1.0, 1.0], C: [1.0, 0.0]}
    rollout = ScriptedRollout(lambda p: group(p, *table[p]), order)
    (batch,) = run([A, B, C], rollout, GroupRules(batch_size=3, score_range=(0.0, 1.0)), 1)
    assert numbers(batch) == [A, C]
    assert batch.exhausted


def test_everything_filtered_ends_with_an_empty_batch_and_a_histogram() -> None:  # B051
    rules = GroupRules(batch_size=2, score_range=(0.0, 1.0))
    (batch,) = run(range(4), ScriptedRollout(lambda p: group(p, 0.0, 0.0)), rules, 1)
    assert batch.groups == []
    assert batch.exhausted
    assert (batch.stats.rejected, batch.stats.pass_rate) == (4, 0.0)
    assert score_histogram(batch.stats.mean_scores) == "0: 4"


@pytest.mark.parametrize(
    ("values", "accepted"),
    [([0.5] * 4, True), ([0.0, 1.0], True), ([0.0, 0.0], False), ([1.0, 1.0], False), ([0.0, 0.0, 0.1], True)],
)
def test_bounds_are_exclusive_and_on_the_mean(values: list[float], accepted: bool) -> None:  # B052
    rules = GroupRules(batch_size=1, score_range=(0.0, 1.0))
    (batch,) = run([0], scores({0: values}), rules, 1)
    assert bool(batch.groups) is accepted


def test_a_score_of_zero_is_a_score() -> None:  # B055
    assert group_score(FakeGroup(0, [FakeSample(score=0.0, reward=-1.0)])) == 0.0
    assert group_score(FakeGroup(0, [FakeSample(score=None, reward=-1.0)])) == -1.0
    assert group_score(FakeGroup(0, [FakeSample(score=0.0), FakeSample(score=None, reward=1.0)])) == 0.5
    assert group_score(group(0, None, 1.0)) == 1.0
    assert group_score(group(0, None, None)) is None


def test_rejected_prompts_are_replaced_one_by_one() -> None:
    table = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0], 3: [1.0, 0.0], 4: [0.0, 1.0], 5: [0.0, 1.0]}
    rollout = scores(table)
    batches = run(range(6), rollout, GroupRules(batch_size=2, score_range=(0.0, 1.0)), 2)
    assert [numbers(b) for b in batches] == [[1, 3], [4, 5]]
    assert rollout.started == [0, 1, 2, 3, 4, 5]
    assert rollout.most_running == 2
    assert batches[0].stats.pass_rate == 0.5


@pytest.mark.parametrize("in_flight", [None, 3, 8])
def test_batches_do_not_depend_on_the_order_of_arrival(in_flight: int | None) -> None:
    table = {p: [0.0, 1.0] if p % 3 else [1.0, 1.0] for p in range(16)}
    expected = None
    for seed in range(6):
        rollout = ScriptedRollout(lambda p: group(p, *table[p]), pauses=random.Random(seed))
        rules = GroupRules(batch_size=4, in_flight=in_flight, score_range=(0.0, 1.0))
        batches = [numbers(b) for b in run(range(16), rollout, rules, 3)]
        expected = expected or batches
        assert batches == expected
    assert expected == [[1, 2, 4, 5], [7, 8, 10, 11], [13, 14]]


def test_surplus_groups_wait_in_the_buffer_for_the_next_batch() -> None:
    rollout = ScriptedRollout(lambda p: group(p, 1.0))

    async def main() -> None:
        runner: GroupRunner[int, FakeGroup] = GroupRunner(range(7), rollout, GroupRules(batch_size=2, in_flight=5))
        seen = []
        while not (batch := await runner.next_batch()).exhausted:
            seen.append(numbers(batch))
        seen.append(numbers(batch))
        assert seen == [[0, 1], [2, 3], [4, 5], [6]]
        assert runner.buffer == []
        assert runner.running == 0

    asyncio.run(asyncio.wait_for(main(), 10))
    assert rollout.started == list(range(7))


def test_a_restored_buffer_comes_first_and_is_not_generated_again() -> None:
    rollout = ScriptedRollout(lambda p: group(p, 1.0))

    async def main() -> None:
        earlier = [group(100, 1.0), group(101, 1.0), group(102, 1.0)]
        runner = GroupRunner(range(3), rollout, GroupRules(batch_size=2), buffer=earlier)
        assert [numbers(await runner.next_batch()) for _ in range(3)] == [[100, 101], [102, 0], [1, 2]]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_by_arrival_takes_what_is_ready_and_keeps_prompt_order() -> None:
    async def main() -> None:
        late = asyncio.Event()

        async def run_group(prompt: int) -> FakeGroup:
            if prompt in (0, 2):
                await late.wait()
            return group(prompt, 1.0)

        rules = GroupRules(batch_size=2, in_flight=4, by_arrival=True)
        runner: GroupRunner[int, FakeGroup] = GroupRunner(range(4), run_group, rules)
        assert numbers(await runner.next_batch()) == [1, 3]
        assert runner.running == 2
        late.set()
        assert numbers(await runner.next_batch()) == [0, 2]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_failed_samples_are_left_out_of_the_group_mean() -> None:  # B064
    rules = GroupRules(batch_size=1, min_survivors=2, max_failed_fraction=0.5)
    (batch,) = run([0], scores({0: [None, 1.0, 0.0, 1.0]}), rules, 1)
    assert numbers(batch) == [0]
    assert batch.stats.failed_samples == 1
    assert batch.stats.mean_scores == [pytest.approx(2 / 3)]


def test_a_group_with_one_survivor_is_dropped_and_replaced() -> None:  # B064
    rules = GroupRules(batch_size=1, min_survivors=2, max_failed_fraction=0.8)
    (batch,) = run(range(2), scores({0: [None, None, None, 1.0], 1: [0.0, 1.0, 1.0, 1.0]}), rules, 1)
    assert numbers(batch) == [1]
    assert (batch.stats.dropped, batch.stats.failed_samples) == (1, 3)


def test_everything_fails_ends_the_run_in_the_first_batch_with_the_first_cause() -> None:  # B064
    rollout = ScriptedRollout(lambda p: group(p, None, None))
    with pytest.raises(RolloutFailedError, match=r"`max_failed_fraction` 0.1 (?s:.*)agent: boom \d"):
        run(itertools.count(), rollout, GroupRules(batch_size=4), 1)
    assert len(rollout.started) == 4


def test_everything_fails_in_a_data_set_smaller_than_a_batch() -> None:
    with pytest.raises(RolloutFailedError, match="4 of 4 samples failed"):
        run(range(2), ScriptedRollout(lambda p: group(p, None, None)), GroupRules(batch_size=1024), 1)


def test_a_few_failures_are_allowed() -> None:
    table: dict[int, Sequence[float | None]] = {p: [1.0] * 5 for p in range(4)}
    table[2] = [None, 1.0, 1.0, 1.0, 1.0]
    (batch,) = run(range(4), scores(table), GroupRules(batch_size=4), 1)
    assert (len(batch.groups), batch.stats.failed_samples) == (4, 1)


@pytest.mark.parametrize("by_arrival", [False, True])
def test_n01_one_failed_sample_of_a_batch_is_a_small_share_whenever_it_comes(by_arrival: bool) -> None:
    """Groups that wait for a batch leave few to settle in the next call; the share stays that of a whole batch."""

    async def main() -> None:
        first = [group(p, 1.0, 1.0, 1.0, 1.0) for p in range(7)]
        rollout = ScriptedRollout(lambda p: group(p, *([None] if p == 100 else [1.0]), 1.0, 1.0, 1.0))
        rules = GroupRules(batch_size=8, by_arrival=by_arrival)
        runner = GroupRunner(range(100, 109), rollout, rules, buffer=first)
        assert len((await runner.next_batch()).groups) == 8  # one group settled, one of its four samples failed
        assert len((await runner.next_batch()).groups) == 8

    asyncio.run(asyncio.wait_for(main(), 10))


def test_n01_the_share_counts_on_across_batches_until_it_is_a_whole_one() -> None:
    async def main() -> None:
        rollout = ScriptedRollout(lambda p: group(p, None, 1.0, 1.0, 1.0))
        pacing = Pacing(8, 3)
        rules = GroupRules(batch_size=8, in_flight=1, by_arrival=True)
        runner = GroupRunner(itertools.count(), rollout, rules, buffer=[group(-1, 1.0)] * 7, pacing=pacing)
        runner._deadlines = dict.fromkeys(range(-7, 0), 3)
        await runner.next_batch()
        with pytest.raises(RolloutFailedError, match="4 of 16 samples failed"):
            await runner.next_batch()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_n01_a_short_last_batch_is_judged_as_a_part_of_a_whole_one() -> None:
    table: dict[int, Sequence[float | None]] = {p: [1.0] * 4 for p in range(9)}
    table[8] = [None, 1.0, 1.0, 1.0]
    batches = run(range(9), scores(table), GroupRules(batch_size=8), 2)
    assert [len(b.groups) for b in batches] == [8, 1]


def test_n11_a_group_that_is_cancelled_from_inside_is_an_error() -> None:
    async def cancelled(prompt: int) -> FakeGroup:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="the group of prompt 0 was cancelled from inside: 7"):
        asyncio.run(asyncio.wait_for(GroupRunner([7], cancelled, GroupRules(batch_size=1)).next_batch(), 10))


def test_an_error_of_run_group_cancels_the_others(caplog: pytest.LogCaptureFixture) -> None:
    cancelled = []

    async def broken(prompt: int) -> FakeGroup:
        if prompt == 1:
            raise ConnectionError("learner rank 0 died")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(prompt)
            raise
        raise AssertionError

    async def main() -> None:
        runner: GroupRunner[int, FakeGroup] = GroupRunner(range(3), broken, GroupRules(batch_size=3))
        with pytest.raises(ConnectionError, match="learner rank 0 died"):
            await runner.next_batch()
        assert runner.running == 0

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(main(), 10))
    assert cancelled == [0, 2]


def test_histogram() -> None:
    assert score_histogram([]) == "no group has a score"
    assert score_histogram([0.0, 0.0, 1.0], bins=2) == "0 .. 0.5: 2\n0.5 .. 1: 1"
    assert GroupStats().pass_rate == 1.0
