"""Groups whose episodes have branches: what counts is the episode."""

from __future__ import annotations

import asyncio

import pytest

from openrlhf.rollout.episodes import by_episode, failures, group_score, names, survivors
from openrlhf.rollout.failure_share import FailureShare, RolloutFailedError
from openrlhf.rollout.groups import GroupRules, GroupRunner
from support.rollout_fakes import FakeGroup, FakeSample, ScriptedRollout


def sample(episode: int | None, score: float | None) -> FakeSample:
    """One with this score; None: failed."""
    if score is None:
        return FakeSample(score=None, failed=True, failure="agent: boom", failure_kind="agent", episode=episode)
    return FakeSample(score=score, episode=episode)


def branched(*episodes: list[float | None]) -> FakeGroup:
    """A group of episodes, each given by the scores of its branches."""
    return FakeGroup(0, [sample(n, score) for n, scores in enumerate(episodes) for score in scores])


UNEVEN = branched([1.0], [1.0], [1.0], [0.0] * 6)
"""Four episodes, of which the one that failed the task has six branches."""


def test_score_of_a_group_is_the_mean_over_its_episodes() -> None:
    assert group_score(UNEVEN) == 0.75
    assert group_score(branched([1.0, 0.0], [0.0])) == 0.25
    assert group_score(branched([1.0, None], [None], [0.0])) == 0.5
    assert group_score(branched([None], [None, None])) is None


def test_samples_without_an_episode_stand_for_themselves() -> None:
    samples = [sample(None, 1.0), sample(0, 0.0), sample(None, 1.0), sample(0, 0.0)]
    assert [len(e) for e in by_episode(samples)] == [1, 2, 1]
    assert len(set(names(samples))) == 3


def test_survivors_and_failures_are_episodes() -> None:
    group = branched([1.0, None], [None, None], [0.0, 1.0])
    assert survivors(group) == 2
    assert [f.episode for f in failures(group.samples)] == [0, 1]


@pytest.mark.parametrize(("allowed", "ends"), [(0.25, False), (0.24, True)])
def test_failure_share_is_that_of_episodes(allowed: float, ends: bool) -> None:
    """One of four episodes fails, in all of its six branches."""
    share = FailureShare(allowed, 1)
    group = branched([1.0], [1.0], [1.0], [None] * 6)
    if ends:
        with pytest.raises(RolloutFailedError, match="1 of 4 samples failed"):
            share.add(group.samples)
    else:
        share.add(group.samples)


def test_filter_judges_the_mean_over_episodes() -> None:
    async def accepted(low: float, high: float) -> int:
        rules = GroupRules(batch_size=1, score_range=(low, high))
        runner: GroupRunner[int, FakeGroup] = GroupRunner([0], ScriptedRollout(lambda _: UNEVEN), rules)
        batch = await runner.next_batch()
        assert batch.stats.samples == 4
        return len(batch.groups)

    assert asyncio.run(accepted(0.7, 0.8)) == 1
    assert asyncio.run(accepted(0.3, 0.4)) == 0
