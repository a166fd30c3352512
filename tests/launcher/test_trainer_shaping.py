"""What is trained on where episodes have branches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrlhf.agents.types import PromptItem
from openrlhf.core.config import RewardShapingConfig
from openrlhf.core.rewards import RunningRewardNorm
from openrlhf.launcher.samples import Group
from openrlhf.launcher.trainer.pipeline import late_failures
from openrlhf.launcher.trainer.shaping import ShapedBatch, shape_groups
from support.trainer_fakes import FAILED, GOOD


def branched(*episodes: list[float | None]) -> Group:
    """A group of episodes, each given by the rewards of its branches; None: a failed one."""
    samples = [
        replace(FAILED, episode=n) if reward is None else replace(GOOD, reward=reward, score=reward, episode=n)
        for n, rewards in enumerate(episodes)
        for reward in rewards
    ]
    return Group(prompt=PromptItem(group_id="g", prompt="p"), samples=samples, handle=object())


UNEVEN = branched([1.0], [1.0], [1.0], [0.0] * 6)
"""Four episodes, of which the one that failed the task has six branches."""


def shape(*groups: Group, estimator: str = "dr_grpo", norm: RunningRewardNorm | None = None) -> ShapedBatch:
    return shape_groups(groups, estimator=estimator, shaping=RewardShapingConfig(), max_response_len=10, norm=norm)


def test_every_branch_is_trained_on_with_the_advantage_of_its_episode() -> None:
    shaped = shape(UNEVEN, branched([0.0], [1.0, 1.0]))
    assert [s.reward for s in shaped.samples] == [0.25] * 3 + [-0.75] * 6 + [-0.5, 0.5, 0.5]


def test_metrics_of_rewards_are_means_over_episodes() -> None:
    metrics = shape(UNEVEN).metrics
    assert metrics["train/reward"] == metrics["train/score"] == metrics["rollout/reward_mean"] == 0.75
    assert metrics["train/group_reward_std"] == 0.5
    assert (metrics["rollout/num_samples"], metrics["rollout/num_episodes"]) == (9, 4)


def test_running_rewards_count_episodes() -> None:
    norm = RunningRewardNorm()
    shape(UNEVEN, norm=norm)
    assert (norm.count, norm.mean) == (4, 0.75)


def test_a_branch_that_failed_leaves_the_others_in() -> None:
    shaped = shape(branched([1.0, None], [0.0], [None]))
    assert [s.reward for s in shaped.samples] == [0.5, -0.5]


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (branched([1.0] * 6, [1.0]), branched([None] * 6, [1.0]), 1),
        (branched([None, 1.0], [1.0]), branched([None, None], [None]), 1),
        (branched([1.0], [1.0]), branched([1.0], [1.0]), 0),
    ],
)
def test_a_reward_model_that_fails_all_branches_failed_one_episode(before: Group, after: Group, count: int) -> None:
    assert len(late_failures([before], [after])) == count
