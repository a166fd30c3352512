"""Advantages, returns and whitening."""

from __future__ import annotations

import pytest
import torch

from openrlhf.core.advantages import compute_advantages, whiten
from openrlhf.core.rewards import token_rewards
from openrlhf.core.tables import ESTIMATORS
from support.core_helpers import INF, NAN, check, mask, rows

ALL = tuple(ESTIMATORS)


@pytest.mark.parametrize(
    ("gamma", "lambd", "expected"),
    [
        (1.0, 1.0, [0.5, 0.6, 0.8]),
        (1.0, 0.95, [0.432, 0.56, 0.8]),
        (0.9, 0.5, [-0.077, 0.14, 0.8]),
        (1.0, 0.0, [-0.1, -0.2, 0.8]),
    ],
)
def test_gae_by_hand(gamma: float, lambd: float, expected: list[float]) -> None:
    values = rows([0.5, 0.4, 0.2])
    adv, ret = compute_advantages("gae", rows([0, 0, 1]), mask([1, 1, 1]), values, gamma, lambd)
    check(adv, [expected], 1e-12)
    check(ret, torch.tensor([expected]) + values, 1e-6)


# B018: the value of a masked slot does not leak.
@pytest.mark.parametrize("under_mask", [100.0, NAN, INF])
def test_masked_value_counts_as_zero(under_mask: float) -> None:
    rewards, values = rows([0, 1, NAN]), rows([0, 0, under_mask])
    adv, _ = compute_advantages("gae", rewards, mask([1, 1, 0]), values, 1.0, 0.95)
    check(adv, [[0.95, 1.0, 0]])


# B019: environment tokens are no states.
def test_gae_skips_environment_tokens() -> None:
    m = mask([1, 0, 1])
    adv, ret = compute_advantages("gae", token_rewards(torch.ones(1), None, 0.0, m), m, rows([0.2, 9, 0.5]))
    check(adv, [[0.8, 0, 0.5]])
    check(ret, [[1, 0, 1]])


def test_gae_with_a_trailing_observation() -> None:  # B019
    m = mask([1, 1, 0])
    rewards = token_rewards(torch.ones(1), None, 0.0, m)
    adv, _ = compute_advantages("gae", rewards, m, torch.zeros(1, 3), 0.9, 0.9)
    check(adv, [[0.81, 1, 0]])


@pytest.mark.parametrize("estimator", ALL)
def test_inserted_environment_tokens_change_nothing(estimator: str) -> None:
    """GAE and returns on a gapped row equal those on the row without its gaps."""
    g = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(1, 5, generator=g), torch.randn(1, 5, generator=g)
    gamma = 0.9 if estimator in ("gae", "reinforce") else 1.0
    dense = compute_advantages(estimator, rewards, mask([1] * 5), values, gamma, 0.8)
    places = torch.tensor([1, 2, 5, 6, 9])
    m = torch.zeros(1, 11, dtype=torch.bool)
    m[0, places] = True
    wide_rewards, wide_values = torch.full((1, 11), 7.0), torch.full((1, 11), -3.0)
    wide_rewards[0, places], wide_values[0, places] = rewards[0], values[0]
    for narrow, wide in zip(
        dense, compute_advantages(estimator, wide_rewards, m, wide_values, gamma, 0.8), strict=True
    ):
        check(wide[:, places], narrow)
        assert (wide[~m] == 0).all()


# B017
@pytest.mark.parametrize("estimator", [e for e, row in ESTIMATORS.items() if row.returns == "discounted"])
def test_returns_flow_through_observations(estimator: str) -> None:
    adv, ret = compute_advantages(estimator, rows([0, 0, 0, 0, 0, 1]), mask([1, 1, 0, 0, 1, 1]))
    check(adv, [[1, 1, 0, 0, 1, 1]])
    check(ret, [[1, 1, 0, 0, 1, 1]])


def test_discount_is_one_decay_per_action() -> None:  # B017
    adv, _ = compute_advantages("reinforce", rows([0, 0, 1]), mask([1, 0, 1]), gamma=0.5)
    check(adv, [[0.5, 0, 1]])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_by_definition(gamma: float) -> None:
    rewards = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, ret = compute_advantages("reinforce", rewards, torch.ones(3, 6, dtype=torch.bool), gamma=gamma)
    expected = [[sum(gamma ** (k - t) * row[k] for k in range(t, 6)) for t in range(6)] for row in rewards.tolist()]
    check(ret, expected, 1e-12)


@pytest.mark.parametrize("estimator", ALL)
def test_all_masked_and_empty(estimator: str) -> None:
    for shape in [(2, 3), (0, 3), (2, 0)]:
        x = torch.full(shape, NAN)
        adv, ret = compute_advantages(estimator, x, torch.zeros(shape, dtype=torch.bool), x)
        assert adv.shape == ret.shape == shape
        assert (adv == 0).all()
        assert (ret == 0).all()


@pytest.mark.parametrize("estimator", [e for e in ALL if e not in ("gae", "reinforce")])
def test_gamma_with_an_estimator_that_does_not_use_it(estimator: str) -> None:
    with pytest.raises(ValueError, match=r"`advantage\.gamma` 0\.9"):
        compute_advantages(estimator, rows([1.0]), mask([1]), gamma=0.9)


def test_errors() -> None:
    with pytest.raises(ValueError, match="needs the values of a critic"):
        compute_advantages("gae", rows([1.0]), mask([1]))
    with pytest.raises(ValueError, match="'flash' is unknown"):
        compute_advantages("flash", rows([1.0]), mask([1]))
    with pytest.raises(ValueError, match=r"values must be \[B, T\]"):
        compute_advantages("gae", rows([1.0, 1.0]), mask([1, 1]), rows([1.0]))
    with pytest.raises(ValueError, match="must be a bool"):
        compute_advantages("rloo", rows([1.0]), rows([1.0]))


def test_whitening_uses_the_population_variance() -> None:
    check(whiten(rows([1, 0, 0, 0]), mask([1, 1, 1, 1])), [[1.7320508, -0.5773503, -0.5773503, -0.5773503]], 1e-6)
    check(whiten(rows([1, 0, 0, 0]), mask([1, 1, 1, 1]), no_std_norm=True), [[0.75, -0.25, -0.25, -0.25]])


def test_whitening_is_over_tokens_and_ignores_the_masked() -> None:
    x, m = rows([1, NAN, 3], [5, INF, 100]), mask([1, 0, 1], [1, 0, 0])
    std = (8 / 3) ** 0.5
    check(whiten(x, m), [[-2 / std, 0, 0], [2 / std, 0, 0]])


def test_whitening_of_constant_or_no_tokens() -> None:
    check(whiten(rows([2, 2, 2]), mask([1, 1, 1])), [[0, 0, 0]])
    check(whiten(rows([2, 2, 2]), mask([0, 0, 0])), [[0, 0, 0]])
    check(whiten(rows([1e-6, 0]), mask([1, 1])), [[0.005, -0.005]])  # variance below the floor of 1e-8


def test_whitening_over_ranks_equals_one_rank() -> None:
    g = torch.Generator().manual_seed(0)
    x, m = torch.randn(6, 5, generator=g) + 100, torch.rand(6, 5, generator=g) < 0.6
    m[5] = False  # the last rank has nothing
    shards = [slice(0, 1), slice(1, 5), slice(5, 6)]
    sums: list[torch.Tensor] = []

    def record(t: torch.Tensor) -> torch.Tensor:
        sums.append(t)
        return t

    for no_std_norm in (False, True):
        whole = whiten(x, m, no_std_norm)
        # First pass: collect every rank's sums; then replay them summed.
        sums.clear()
        whiten(x, m, no_std_norm, record)
        reduced = list(sums)
        for shard in shards:
            replay = iter(reduced)
            check(whiten(x[shard], m[shard], no_std_norm, lambda _, replay=replay: next(replay)), whole[shard], 1e-6)
