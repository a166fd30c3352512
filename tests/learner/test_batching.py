"""Shares per rank and micro-batches per share."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.learner.batching import (
    fixed_micro_batches,
    padded_micro_batches,
    partition_by_cost,
    sample_cost,
    token_micro_batches,
)


def log_normal_lengths(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [min(max(int(rng.lognormvariate(6.0, 0.8)), 16), 4096) for _ in range(count)]


def test_sample_cost_is_linear_plus_quadratic() -> None:
    assert sample_cost(600, 100) == 600 * (1 + 600 / 600)


def test_partition_of_six_costs() -> None:
    assert partition_by_cost([5, 4, 3, 3, 2, 1], 2) == [[0, 3, 5], [1, 2, 4]]


def test_partition_with_more_shares_than_samples_leaves_some_empty() -> None:
    assert partition_by_cost([1.0, 2.0], 4) == [[1], [0], [], []]


def test_partition_into_no_shares_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 shares"):
        partition_by_cost([1.0], 0)


def test_many_ranks_are_balanced_with_the_fewest_micro_batches() -> None:
    """2,048 log-normal lengths over 32 ranks: ≤ 1.005 max/mean, the least micro-batches."""
    lengths, hidden, budget = log_normal_lengths(2048), 1024, 8192
    costs = [sample_cost(n, hidden) for n in lengths]
    shares = partition_by_cost(costs, 32)
    plans = [token_micro_batches([lengths[i] for i in share], budget, hidden_size=hidden) for share in shares]
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) / (sum(loads) / 32) <= 1.005
    tokens = [sum(lengths[i] for i in share) for share in shares]
    assert [len(plan) for plan in plans] == [math.ceil(t / budget) for t in tokens]
    assert sorted(i for share in shares for i in share) == list(range(2048))


def test_the_plan_costs_little_more_than_in_proportion_to_the_samples() -> None:
    def cpu(samples: int) -> float:
        lengths, least = log_normal_lengths(samples), math.inf
        for _ in range(3):
            start = time.process_time()
            for share in partition_by_cost([sample_cost(n, 1024) for n in lengths], 32):
                token_micro_batches([lengths[i] for i in share], 8192, hidden_size=1024)
            least = min(least, time.process_time() - start)
        return least

    assert cpu(8192) / cpu(2048) < 8  # four times the samples; a quadratic plan costs 16 times as much


def test_fixed_micro_batches_group_like_lengths() -> None:
    assert fixed_micro_batches([3, 9, 4, 8, 1], 2) == [[1, 3], [0, 2], [4]]


def test_one_fixed_micro_batch_keeps_the_order() -> None:
    assert fixed_micro_batches([3, 9], 8) == [[0, 1]]
    assert fixed_micro_batches([], 8) == []


def test_fixed_micro_batch_size_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fixed_micro_batches([1], 0)


def test_sample_over_the_budget_is_alone() -> None:
    assert token_micro_batches([10, 3, 3], 6, hidden_size=64) == [[0], [1, 2]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 120))
def test_token_plan_covers_each_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = token_micro_batches(lengths, budget, hidden_size=64)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    assert all(len(rows) == 1 or sum(lengths[i] for i in rows) <= budget for rows in plan)
    assert all(plan)


def test_padding_counts_against_the_budget_of_padded_rows() -> None:
    assert padded_micro_batches([4, 10, 5, 3, 30, 9], 20) == [[4], [1, 5], [0, 2, 3]]
    assert padded_micro_batches([], 20) == []


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100))
def test_padded_rows_keep_to_the_budget_and_none_is_lost(lengths: list[int], budget: int) -> None:
    plan = padded_micro_batches(lengths, budget)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget for rows in plan)
