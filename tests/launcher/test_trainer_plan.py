"""Which sample goes into which optimiser step and onto which rank."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.trainer.plan import (
    cut_mini_batches,
    epoch_order,
    epoch_seed,
    shared_cost,
    split_over_ranks,
)
from openrlhf.learner.batching import sample_cost, token_micro_batches


def samples(lengths: list[int]) -> list[SampleRef]:
    return [SampleRef(handle="h", position=i, index=i, reward=0.0, length=n) for i, n in enumerate(lengths)]


def test_last_mini_batch_may_be_smaller() -> None:  # B049
    cut = cut_mini_batches(samples([1] * 10), batch_size=4, seed=1, step=0)
    assert [len(part) for part in cut] == [4, 4, 2]
    assert sorted(s.index for part in cut for s in part) == list(range(10))


def test_cut_depends_on_seed_and_step_only() -> None:
    def order(seed: int, step: int) -> list[int]:
        return [
            s.index for part in cut_mini_batches(samples([1] * 16), batch_size=4, seed=seed, step=step) for s in part
        ]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_epochs_take_every_mini_batch_once() -> None:
    assert epoch_order(5, seed=1, step=3, epoch=0) == [0, 1, 2, 3, 4]
    assert sorted(epoch_order(5, seed=1, step=3, epoch=1)) == [0, 1, 2, 3, 4]


def test_members_change_from_the_second_epoch_on() -> None:
    seeds = [epoch_seed(3, seed=1, step=step, epoch=epoch) for step in (0, 1) for epoch in (0, 1, 2)]
    assert seeds[0] is seeds[3] is None
    assert len(set(seeds)) == 5
    assert epoch_seed(1, seed=1, step=0, epoch=1) is None  # one mini-batch has all of them


@given(st.lists(st.integers(1, 500), max_size=70), st.integers(1, 9))
def test_ranks_share_all_samples_in_equal_counts(lengths: list[int], ranks: int) -> None:
    shares = split_over_ranks(samples(lengths), ranks, hidden_size=64)
    counts = [len(share) for share in shares]
    assert sorted(s.index for share in shares for s in share) == list(range(len(lengths)))
    assert max(counts) - min(counts) <= 1


def groups(*lengths: list[int], prompt: int) -> list[SampleRef]:
    """Samples of some prompts, one after the other as in a rollout batch."""
    names = [f"h{number}" for number in range(len(lengths))]  # the same object for all samples of a group
    parts = [(name, i, n) for name, group in zip(names, lengths, strict=True) for i, n in enumerate(group)]
    return [
        SampleRef(handle=handle, position=i, index=index, reward=0.0, length=n, prompt_length=prompt)
        for index, (handle, i, n) in enumerate(parts)
    ]


def handles(shares: list[list[SampleRef]]) -> list[list[str]]:
    return [sorted({s.handle for s in share}) for share in shares]


def test_groups_whose_prompts_are_computed_once_stay_whole() -> None:
    batch = groups([60] * 4, [60] * 4, [60] * 4, [60] * 4, prompt=50)
    shares = split_over_ranks(batch, 2, hidden_size=64, share_prompt=True)
    assert [len(share) for share in shares] == [8, 8]
    assert [len(found) for found in handles(shares)] == [2, 2]
    assert [len(found) for found in handles(split_over_ranks(batch, 2, hidden_size=64))] == [4, 4]


def test_a_group_is_cut_where_counts_ask_for_it() -> None:
    batch = groups([60] * 4, [60] * 4, [60] * 4, prompt=50)
    shares = split_over_ranks(batch, 2, hidden_size=64, share_prompt=True)
    assert [len(share) for share in shares] == [6, 6]
    assert sorted(len(found) for found in handles(shares)) == [2, 2]


def test_groups_are_spread_where_one_is_much_longer() -> None:
    batch = groups([500] * 4, [20] * 4, prompt=10)
    shares = split_over_ranks(batch, 2, hidden_size=64, share_prompt=True)
    assert handles(shares) == [["h0", "h1"]] * 2
    assert shares == split_over_ranks(batch, 2, hidden_size=64)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 200), min_size=1, max_size=8)), max_size=8),
    st.integers(1, 6),
)
def test_whole_groups_keep_counts_equal_and_the_slowest_rank_no_slower(
    shapes: list[tuple[int, list[int]]], ranks: int
) -> None:
    names = [f"h{number}" for number in range(len(shapes))]
    batch = [
        SampleRef(handle=names[number], position=i, index=10 * number + i, reward=0.0, length=p + n, prompt_length=p)
        for number, (p, answers) in enumerate(shapes)
        for i, n in enumerate(answers)
    ]
    apart, shares = (split_over_ranks(batch, ranks, hidden_size=64, share_prompt=on) for on in (False, True))
    assert sorted(s.index for share in shares for s in share) == sorted(s.index for s in batch)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    slowest = [max(shared_cost(share, 64) for share in found) for found in (shares, apart)]
    assert slowest[0] <= slowest[1]


def test_ranks_share_work() -> None:
    shares = split_over_ranks(samples([100, 90, 50, 45, 10, 5, 3, 1]), 2, hidden_size=64)
    loads = [sum(sample_cost(s.length, 64) for s in share) for share in shares]
    assert max(loads) / min(loads) == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("hidden", [576, 1024, 4096])
def test_many_ranks_are_balanced_with_the_fewest_micro_batches(hidden: int) -> None:
    """2,048 log-normal lengths over 32 ranks: at most 1.005 max/mean, the least micro-batches."""
    rng, budget = random.Random(0), 8192
    lengths = [min(max(int(rng.lognormvariate(6.0, 0.8)), 16), 4096) for _ in range(2048)]
    shares = split_over_ranks(samples(lengths), 32, hidden_size=hidden)
    plans = [token_micro_batches([s.length for s in share], budget, hidden_size=hidden) for share in shares]
    loads = [sum(sample_cost(s.length, hidden) for s in share) for share in shares]
    assert max(loads) / (sum(loads) / 32) <= 1.005
    assert [len(plan) for plan in plans] == [math.ceil(sum(s.length for s in share) / budget) for share in shares]
    assert max(len(plan) for plan in plans) == math.ceil(sum(lengths) / 32 / budget)
