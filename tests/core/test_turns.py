"""Credit per turn: closed forms of every estimator, and what holds for any turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.core.advantages import compute_advantages
from openrlhf.core.rewards import group_baseline, token_rewards
from openrlhf.core.tables import ESTIMATORS
from openrlhf.core.turns import TurnCredit, turn_credit

FOUR = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
"""Four episodes of two turns that succeed or fail on their own: G_1 is 1, 2, 0, 1 and G_2 is 0, 1, 0, 1."""
ROOT = math.sqrt
GROUPS = sorted(name for name, row in ESTIMATORS.items() if row.groups)


def credit(mode: Any, estimator: str, turns: Sequence[Sequence[float]], **changes: Any) -> TurnCredit:
    """Of one group whose samples are episodes, rewarded by their turns alone."""
    whole = torch.tensor([math.fsum(rewards) for rewards in turns], dtype=torch.float64)
    names = {"groups": [0] * len(turns), "episodes": list(range(len(turns))), **changes}
    return turn_credit(mode, estimator, names.pop("shaped", whole), turns, **names)


def advantages(found: TurnCredit) -> list[list[float]]:
    """What the tokens of every turn get: the undiscounted return of the placed rewards."""
    return [[math.fsum(rewards[k:]) for k in range(len(rewards))] for rewards in found.rewards]


def flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("dr_grpo", [0, 1, -1, 0], [-0.5, 0.5, -0.5, 0.5]),
        ("reinforce_baseline", [0, 1, -1, 0], [-0.5, 0.5, -0.5, 0.5]),
        ("rloo", [0, 4 / 3, -4 / 3, 0], [-2 / 3, 2 / 3, -2 / 3, 2 / 3]),
        ("group_norm", [0, ROOT(3 / 2), -ROOT(3 / 2), 0], [-ROOT(3) / 2, ROOT(3) / 2, -ROOT(3) / 2, ROOT(3) / 2]),
        ("maxrl", [0, 1, -1, 0], [-1, 1, -1, 1]),
    ],
)
def test_two_turns_compared_by_what_they_and_later_ones_earn(
    estimator: str, first: list[float], second: list[float]
) -> None:
    found = advantages(credit("to_go", estimator, FOUR))
    assert [a for a, _ in found] == pytest.approx(first, abs=1e-8)
    assert [b for _, b in found] == pytest.approx(second, abs=1e-8)


def test_each_turn_normalised_on_its_own_is_mt_grpo() -> None:
    """A_1 = (r_1 - mean) / std + lambda (r_2 - mean) / std and A_2 = (r_2 - mean) / std."""
    found = advantages(credit("each", "group_norm", FOUR, gamma=0.5))
    unit = ROOT(3) / 2
    assert [b for _, b in found] == pytest.approx([-unit, unit, -unit, unit], abs=1e-8)
    assert [a for a, _ in found] == pytest.approx([unit / 2, unit * 1.5, -unit * 1.5, -unit / 2], abs=1e-8)


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
def test_without_a_baseline_rewards_lie_where_they_were_earned(estimator: str) -> None:
    found = credit("to_go", estimator, [[1.0, 0.0, 2.0], [3.0]])
    assert found.rewards == [[1.0, 0.0, 2.0], [3.0]]
    assert found.alone == 0


def test_later_turns_are_discounted() -> None:
    found = advantages(credit("to_go", "dr_grpo", [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], gamma=0.5))
    assert found[0] == pytest.approx([0.125, 0.25, 0.5])


def test_turns_are_compared_among_the_episodes_that_reached_them() -> None:
    found = credit("to_go", "dr_grpo", [[0.0], [0.0, 1.0], [0.0, 0.0, 4.0], [0.0, 0.0]])
    expected = [-1.25, -0.25, -2 / 3, 2.75, 7 / 3, 0.0, -1.25, -5 / 3]  # the third turn is alone
    assert flat(advantages(found)) == pytest.approx(expected)
    assert (found.alone, found.turns) == (1, 8)


def test_what_shaping_changed_and_other_branches_earned_lies_on_the_last_turn() -> None:
    shaped = torch.tensor([1.5, 3.0, 3.0], dtype=torch.float64)
    found = credit("to_go", "reinforce", [[1.0, 1.0], [2.0], [0.5, 0.5]], shaped=shaped, episodes=[0, 1, 1])
    assert found.rewards == [[1.0, 0.5], [3.0], [0.5, 2.5]]


def test_rewards_of_turns_are_scaled_as_normalising_scaled_the_whole() -> None:
    shaped = torch.tensor([(3.0 - 2.0) / 4.0, (1.0 - 2.0) / 4.0], dtype=torch.float64)
    found = credit("to_go", "reinforce", [[2.0, 1.0], [1.0, 0.0]], shaped=shaped, scale=0.25)
    assert found.rewards == [[0.5, -0.25], [0.25, -0.5]]


def test_branches_count_once_and_differ_by_their_own_turns() -> None:
    """Two branches of one episode against one other: by turn, an episode is the mean of its branches."""
    found = credit(
        "to_go",
        "dr_grpo",
        [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]],
        shaped=torch.tensor([2.0, 2.0, 0.0]),
        episodes=["a", "a", "b"],
    )
    # G of the branches: (2, 1) and (2, 2); of the other episode (0, 0). Means by turn: 1 and 0.75.
    assert flat(advantages(found)) == pytest.approx([1.0, 0.25, 1.0, 1.25, -1.0, -0.75])


@pytest.mark.parametrize(("turns", "groups"), [([[1.0], []], [0, 0]), ([[1.0]], [0, 0])])
def test_every_sample_has_a_turn(turns: list[list[float]], groups: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        turn_credit("to_go", "rloo", torch.zeros(2), turns, groups=groups, episodes=[0, 1])


EPISODES = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=2, max_size=6)


@given(EPISODES, st.sampled_from(GROUPS), st.sampled_from(["to_go", "each"]))
def test_equal_episodes_have_advantages_of_exactly_zero(episodes: list[list[float]], estimator: str, mode: str) -> None:
    found = credit(mode, estimator, [episodes[0]] * len(episodes))
    assert all(value == 0 for rewards in found.rewards for value in rewards)


@given(EPISODES, st.sampled_from(sorted(set(GROUPS) - {"group_norm", "maxrl"})), st.integers(1, 4))
def test_baselines_that_subtract_are_the_same_in_both_orders(
    episodes: list[list[float]], estimator: str, length: int
) -> None:
    even = [(rewards * 4)[:length] for rewards in episodes]
    both = [flat(advantages(credit(mode, estimator, even))) for mode in ("to_go", "each")]
    assert both[0] == pytest.approx(both[1], abs=1e-9)


@given(EPISODES, st.sampled_from(GROUPS))
def test_one_turn_is_the_scalar_reward(episodes: list[list[float]], estimator: str) -> None:
    whole = torch.tensor([sum(rewards) for rewards in episodes], dtype=torch.float64)
    expected = group_baseline(estimator, whole, [0] * len(whole)).rewards.tolist()
    found = credit("to_go", estimator, [[value] for value in whole.tolist()])
    assert [rewards[0] for rewards in found.rewards] == pytest.approx(expected)


@given(EPISODES, st.sampled_from(GROUPS), st.sampled_from(["to_go", "each"]), st.data())
def test_tokens_of_a_turn_get_its_advantage(
    episodes: list[list[float]], estimator: str, mode: str, data: st.DataObject
) -> None:
    """Whatever the lengths of turns and of what stands between them."""
    found = credit(mode, estimator, episodes)
    for rewards, expected in zip(found.rewards, advantages(found), strict=True):
        mask, placed, wanted = [False], [0.0], [0.0]
        for reward, advantage in zip(rewards, expected, strict=True):
            sampled = data.draw(st.integers(1, 3))
            feedback = data.draw(st.integers(0, 2))
            mask += [True] * sampled + [False] * feedback
            placed += [0.0] * (sampled - 1) + [reward] + [0.0] * feedback
            wanted += [advantage] * sampled + [0.0] * feedback
        action = torch.tensor([mask])
        tokens = token_rewards(torch.zeros(1), None, 0.0, action, turns=torch.tensor([placed], dtype=torch.float64))
        got, _ = compute_advantages(estimator, tokens, action)
        assert got[0].tolist() == pytest.approx(wanted, abs=1e-9)
