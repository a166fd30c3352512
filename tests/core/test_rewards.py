"""Reward shaping, baselines over a prompt's samples, token rewards."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch

from openrlhf.core.config import RewardShapingConfig
from openrlhf.core.rewards import (
    RunningRewardNorm,
    group_baseline,
    overlong_penalty,
    shape_rewards,
    stop_properly_penalty,
    token_rewards,
)
from openrlhf.core.tables import ESTIMATORS
from support.core_helpers import INF, NAN, check, mask, rows

GROUPS = tuple(name for name, row in ESTIMATORS.items() if row.groups)
F64 = torch.float64
SQRT_HALF = 0.7071067811865476


def vec(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


# B013
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("group_norm", [1.5, -0.5, -0.5, -0.5]),  # unbiased std
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("reinforce_baseline", [0.75, -0.25, -0.25, -0.25]),
        ("maxrl", [3, -1, -1, -1]),
        ("reinforce", [1, 0, 0, 0]),
        ("gae", [1, 0, 0, 0]),
    ],
)
def test_baseline_of_one_group(estimator: str, expected: list[float]) -> None:
    result = group_baseline(estimator, vec(1, 0, 0, 0), ["p"] * 4)
    check(result.rewards, expected, 1e-8)
    assert result.keep.all()
    assert result.dropped_groups == 0
    assert result.group_std == pytest.approx(0.5)


# B014
@pytest.mark.parametrize("marker", ["nan", "valid"])
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("group_norm", [-SQRT_HALF, 0, SQRT_HALF]),
        ("rloo", [-2, 0, 2]),
        ("dr_grpo", [-1, 0, 1]),
        ("reinforce_baseline", [-1, 0, 1]),
        ("maxrl", [-0.5, 0, 0.5]),
        ("reinforce", [1, 0, 3]),
        ("gae", [1, 0, 3]),
    ],
)
def test_failed_sample_is_left_out(estimator: str, expected: list[float], marker: str) -> None:
    if marker == "nan":
        result = group_baseline(estimator, vec(1, NAN, 3), [7, 7, 7])
    else:
        result = group_baseline(estimator, vec(1, 1e6, 3), [7, 7, 7], torch.tensor([True, False, True]))
    check(result.rewards, expected, 1e-8)
    assert result.keep.tolist() == [True, False, True]


# B014: one of eight survives; B012: a group of one.
@pytest.mark.parametrize("estimator", GROUPS)
@pytest.mark.parametrize("rewards", [[1.0] + [NAN] * 7, [1.0], [INF, -INF, 2.0], [NAN, NAN]])
def test_group_with_fewer_than_two_survivors_is_dropped(estimator: str, rewards: list[float]) -> None:
    result = group_baseline(estimator, vec(*rewards), [0] * len(rewards))
    assert not result.keep.any()
    assert result.rewards.tolist() == [0.0] * len(rewards)
    assert result.dropped_groups == 1
    assert result.group_std == 0.0


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
def test_single_samples_are_kept_without_a_baseline(estimator: str) -> None:
    result = group_baseline(estimator, vec(2, NAN, 3), ["a", "b", "c"])
    check(result.rewards, [2, 0, 3])
    assert result.keep.tolist() == [True, False, True]
    assert result.dropped_groups == 1


# B016: groups by identity, whatever the order.
@pytest.mark.parametrize("estimator", GROUPS)
def test_constant_groups_have_advantage_exactly_zero_in_any_order(estimator: str) -> None:
    samples = [("a", 0.1)] * 4 + [("b", 1 / 3)] * 4 + [("c", 1e6 + 0.1)] * 3
    for seed in range(20):
        random.Random(seed).shuffle(samples)
        result = group_baseline(estimator, vec(*(r for _, r in samples)), [g for g, _ in samples])
        assert result.rewards.tolist() == [0.0] * len(samples)


# O13: seven of eight samples.
@pytest.mark.parametrize("estimator", GROUPS)
def test_incomplete_group_does_not_shift_the_others(estimator: str) -> None:
    a, b = vec(0, 1, 2, 5), vec(1, 0, 0)
    alone = [group_baseline(estimator, a, "aaaa").rewards, group_baseline(estimator, b, "bbb").rewards]
    check(group_baseline(estimator, torch.cat([a, b]), "aaaabbb").rewards, torch.cat(alone))
    check(group_baseline(estimator, torch.cat([b, a]), "bbbaaaa").rewards, torch.cat(alone[::-1]))


@pytest.mark.parametrize("estimator", GROUPS)
def test_order_of_arrival_is_irrelevant(estimator: str) -> None:
    rewards, ids = vec(0, 1, 2, 5, 1, 0, 3), torch.tensor([4, 4, 9, 4, 9, 9, 4])
    reference = group_baseline(estimator, rewards, ids).rewards
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    check(group_baseline(estimator, rewards[order], ids[order]).rewards, reference[order], 1e-12)


@pytest.mark.parametrize("rewards", [(-1.0, 1.0), (0.0, 0.0), (-3.0, 1.0), (0.1, -0.3, 0.2)])
def test_maxrl_has_nothing_to_say_without_a_success_on_balance(rewards: tuple[float, ...]) -> None:
    assert group_baseline("maxrl", vec(*rewards), [0] * len(rewards)).rewards.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", sorted(set(GROUPS) - {"maxrl"}))
def test_a_constant_added_to_all_rewards_of_a_prompt_changes_nothing(estimator: str) -> None:
    rewards = vec(0, 1, 2, 5)
    reference = group_baseline(estimator, rewards, [0] * 4).rewards
    check(group_baseline(estimator, rewards + 1000.5, [0] * 4).rewards, reference, 1e-10)


def test_group_norm_ignores_the_scale_of_rewards() -> None:
    rewards = vec(0, 1, 2, 5)
    reference = group_baseline("group_norm", rewards, [0] * 4).rewards
    check(group_baseline("group_norm", rewards * 37, [0] * 4).rewards, reference, 1e-8)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = torch.randn(6, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = [float(r - (rewards.sum() - r) / 5) for r in rewards]
    check(group_baseline("rloo", rewards, [0] * 6).rewards, expected, 1e-12)


def test_group_std_is_the_mean_over_groups() -> None:
    result = group_baseline("group_norm", vec(0, 2, 5, 5, 9), "aabbc")
    assert result.group_std == pytest.approx(math.sqrt(2) / 2)
    assert result.dropped_groups == 1


def test_group_baseline_refuses_missing_ids() -> None:
    with pytest.raises(ValueError, match="3 group_ids for 2 rewards"):
        group_baseline("rloo", vec(1, 2), [1, 1, 1])
    with pytest.raises(ValueError, match="vectors of one length"):
        group_baseline("rloo", vec(1, 2), [1, 1], torch.tensor([True]))


# B028
@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_overlong_penalty(length: int, expected: float) -> None:
    assert float(overlong_penalty(torch.tensor([length]), 100, 20, 1.0)) == pytest.approx(expected)
    assert float(overlong_penalty(torch.tensor([length]), 100, 20, 0.5)) == pytest.approx(expected / 2)


def test_overlong_buffer_of_zero_is_off() -> None:  # B028
    assert overlong_penalty(torch.tensor([5, 100, 500]), 100, 0, 1.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("buffer", [101.0, -1.0])
def test_overlong_buffer_out_of_range(buffer: float) -> None:
    with pytest.raises(ValueError, match=r"`overlong_buffer_len`"):
        overlong_penalty(torch.tensor([5]), 100, buffer, 1.0)


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(0.0, [0, 2, 0]), (0.5, [0.5, 2, -0.5]), (1.0, [1, 2, -1]), (-0.5, [-0.5, 2, -0.5])],
)
def test_stop_properly_penalty(coef: float, expected: list[float]) -> None:
    check(stop_properly_penalty(vec(1, 2, -1), torch.tensor([True, False, True]), coef), expected)


def test_stop_properly_penalty_above_one() -> None:
    with pytest.raises(ValueError, match=r"`stop_properly_penalty_coef` must be <= 1, got 1\.5"):
        stop_properly_penalty(vec(1), torch.tensor([True]), 1.5)


def shape(rewards: list[float], config: RewardShapingConfig, norm: RunningRewardNorm | None = None) -> list[float]:
    n = len(rewards)
    lengths, truncated = torch.tensor([90, 10, 100][:n]), torch.tensor([False, False, True][:n])
    return shape_rewards(
        vec(*rewards), lengths=lengths, truncated=truncated, max_length=100, config=config, norm=norm
    ).tolist()


def test_shaping_defaults_only_clip() -> None:
    assert shape([5, 50, -50], RewardShapingConfig()) == [5, 10, -10]


def test_shaping_order_clip_then_overlong_then_stop() -> None:
    config = RewardShapingConfig(clip_range=(-1.0, 1.0), overlong_buffer_len=20, stop_properly_penalty_coef=0.5)
    # 3 -> clipped 1 -> -0.5 overlong; 1 -> 1; 3 -> clipped 1 -> -1 overlong -> times 0.5
    assert shape([3, 1, 3], config) == pytest.approx([0.5, 1, 0])
    config = RewardShapingConfig(overlong_buffer_len=20, overlong_penalty_factor=2, stop_properly_penalty_coef=-0.25)
    assert shape([3, 1, 3], config) == pytest.approx([2, 1, -0.25])


def test_shaping_normalises_before_the_clip() -> None:
    norm = RunningRewardNorm()
    norm.update(vec(0, 10, 20))
    std = math.sqrt(200 / 3)
    config = RewardShapingConfig(normalize_enable=True, clip_range=(-1.0, 1.0))
    assert shape([0, 10, 20], config, norm) == pytest.approx([-1, 0, 1])
    config = RewardShapingConfig(normalize_enable=True)
    assert shape([0, 10, 20], config, norm) == pytest.approx([-10 / std, 0, 10 / std])


def test_shaping_keeps_a_failed_sample_nan() -> None:
    assert math.isnan(shape([NAN, 1], RewardShapingConfig(overlong_buffer_len=20))[0])


def test_shaping_errors() -> None:
    with pytest.raises(ValueError, match=r"`clip_range`"):
        shape([1], RewardShapingConfig(clip_range=(1.0, -1.0)))
    with pytest.raises(ValueError, match="vectors of one length"):
        shape_rewards(
            vec(1),
            lengths=torch.tensor([1, 2]),
            truncated=torch.tensor([True]),
            max_length=9,
            config=RewardShapingConfig(),
        )


@pytest.mark.parametrize("splits", [[0, 100], [0, 1, 2, 50, 100], list(range(101))])
def test_running_norm_equals_one_pass_over_everything(splits: list[int]) -> None:
    rewards = torch.randn(100, dtype=F64, generator=torch.Generator().manual_seed(0)) * 3 + 100
    norm = RunningRewardNorm()
    for start, stop in pairwise(splits):
        norm.update(rewards[start:stop])
    assert norm.mean == pytest.approx(float(rewards.mean()), rel=1e-12)
    assert norm.std == pytest.approx(float(rewards.std(correction=0)), rel=1e-10)
    check(norm.normalize(rewards), (rewards - rewards.mean()) / rewards.std(correction=0), 1e-9)


def test_running_norm_leaves_failed_samples_out() -> None:
    norm = RunningRewardNorm()
    norm.update(vec(1, NAN, 3, INF, 100), torch.tensor([True, True, True, True, False]))
    assert (norm.count, norm.mean, norm.std) == (2, 2, 1)
    norm.update(vec(NAN))
    assert norm.count == 2


def test_running_norm_of_equal_rewards_is_zero() -> None:
    norm = RunningRewardNorm()
    norm.update(vec(1, 1, 1))
    assert norm.normalize(vec(1, 1)).tolist() == [0, 0]


def test_running_norm_starts_from_stored_statistics() -> None:
    norm = RunningRewardNorm.from_stored(2.0, 4.0)
    check(norm.normalize(vec(2, 6)), [0, 1])
    norm.update(vec(2.0))
    assert norm.std == pytest.approx(4.0, rel=1e-2)
    with pytest.raises(ValueError, match="stored mean and std"):
        RunningRewardNorm.from_stored(0.0, 0.0)


def test_running_norm_state_round_trip() -> None:
    first, second = RunningRewardNorm(), RunningRewardNorm()
    first.update(vec(1, 2, 5))
    second.load_state_dict(first.state_dict())
    first.update(vec(7))
    second.update(vec(7))
    assert first.state_dict() == second.state_dict()


# B021: the score sits on the last action token.
@pytest.mark.parametrize(
    ("action_mask", "expected"),
    [
        ([1, 1, 1, 0, 0], [0, 0, 1, 0, 0]),
        ([1, 1, 1], [0, 0, 1]),
        ([0, 1, 0, 1, 0], [0, 0, 0, 1, 0]),
        ([0, 0, 0], [0, 0, 0]),
        ([1], [1]),
    ],
)
def test_reward_sits_on_the_last_trainable_token(action_mask: list[int], expected: list[float]) -> None:
    check(token_rewards(vec(1), None, 0.1, mask(action_mask)), [expected])


# B027
def test_kl_penalty_per_token() -> None:
    m = mask([1, 1, 1])
    check(token_rewards(vec(1), rows([0.2, 0.2, 0.2]), 0.1, m), [[-0.02, -0.02, 0.98]])
    check(token_rewards(vec(1), None, 0.1, m), [[0, 0, 1]])
    check(token_rewards(vec(1), rows([0.2, 0.2, 0.2]), 0.0, m), [[0, 0, 1]])


def test_kl_under_the_mask_is_ignored() -> None:
    result = token_rewards(vec(1, 2), rows([NAN, 0.5, INF], [0.5, 1.0, NAN]), 1.0, mask([0, 1, 0], [1, 1, 0]))
    check(result, [[0, 0.5, 0], [-0.5, 1, 0]])


def test_token_rewards_check_shapes() -> None:
    with pytest.raises(ValueError, match="reward must be"):
        token_rewards(vec(1, 2), None, 0.0, mask([1, 1]))
    with pytest.raises(ValueError, match="kl must be"):
        token_rewards(vec(1), rows([1.0]), 0.0, mask([1, 1]))


BRANCHES = vec(1, 1, 1, 0, 0, 0, 0, 0, 0), [0, 1, 2, *[3] * 6]
"""Four episodes, of which the one that failed the task has six branches: the mean is 0.75, not 1/3."""


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        ("rloo", 1 / 3, -1),
        ("group_norm", 0.5, -1.5),
        ("dr_grpo", 0.25, -0.75),
        ("reinforce_baseline", 0.25, -0.75),
        ("maxrl", 1 / 3, -1),
        ("reinforce", 1, 0),
        ("gae", 1, 0),
    ],
)
def test_an_episode_with_branches_counts_once(estimator: str, right: float, wrong: float) -> None:
    rewards, episodes = BRANCHES
    result = group_baseline(estimator, rewards, ["p"] * 9, episodes=episodes)
    check(result.rewards, [right] * 3 + [wrong] * 6, 1e-8)
    assert result.group_std == pytest.approx(0.5)
    order = torch.tensor([4, 0, 8, 2, 3, 1, 7, 5, 6])
    mixed = group_baseline(estimator, rewards[order], ["p"] * 9, episodes=torch.tensor(episodes)[order])
    check(mixed.rewards, result.rewards[order], 0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # the first episode's branches have 1 and 3: it counts with 2, the others with 0 and 4, the mean is 2
        ("rloo", [-1, 1, -3, 3]),
        ("group_norm", [-0.5, 0.5, -1, 1]),
        ("dr_grpo", [-1, 1, -2, 2]),
        ("reinforce_baseline", [-1, 1, -2, 2]),
        ("maxrl", [-0.5, 0.5, -1, 1]),
        ("reinforce", [1, 3, 0, 4]),
        ("gae", [1, 3, 0, 4]),
    ],
)
def test_branches_with_rewards_of_their_own_share_the_baseline(estimator: str, expected: list[float]) -> None:
    check(group_baseline(estimator, vec(1, 3, 0, 4), ["p"] * 4, episodes=[0, 0, 1, 2]).rewards, expected, 1e-8)


def test_failed_branches_are_left_out_and_failed_episodes_are_no_survivors() -> None:
    ids, episodes = list("aaaaabb"), [0, 0, 1, 1, 2, 0, 0]
    result = group_baseline("rloo", vec(1, NAN, 0, 0, NAN, 5, 5), ids, episodes=episodes)
    check(result.rewards, [1, 0, -1, -1, 0, 0, 0], 1e-12)
    assert result.keep.tolist() == [True, False, True, True, False, False, False]
    assert result.dropped_groups == 1  # the branches of the one episode of b can be compared with nothing


def test_group_baseline_refuses_missing_episodes() -> None:
    with pytest.raises(ValueError, match="3 episodes for 2 rewards"):
        group_baseline("rloo", vec(1, 2), [1, 1], episodes=[1, 2, 3])
