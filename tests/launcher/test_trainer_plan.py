"""Which sample goes into which optimiser step and onto which rank."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.launcher.samples import SampleRef
from openrlhf.launcher.trainer.plan import cut_mini_batches, epoch_order, epoch_seed, split_over_ranks
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
