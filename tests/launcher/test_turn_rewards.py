"""A reward per turn, from what an agent said of its turns to the advantages of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from openrlhf.agents.types import PromptItem, StopReason, Trajectory, Turn
from openrlhf.core.config import AdvantageConfig, AlgoConfig, KLConfig, RewardShapingConfig
from openrlhf.core.rewards import RunningRewardNorm
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank
from openrlhf.launcher.record.schema import samples_of, table_of
from openrlhf.launcher.samples import Group, cut, fail_misplaced, sample_info
from openrlhf.launcher.trainer.shaping import ShapedBatch, shape_groups
from support.recorded import sample
from support.toy_ranks import toy_config, toy_rank
from support.trainer_fakes import GOOD, fake_run

ROOT = math.sqrt


def episode(number: int, *rewards: float | None, trainable: Sequence[int] | None = None, **changes: Any) -> Trajectory:
    """Turns of two tokens with one of the environment before each; token t is number t."""
    n = 3 * len(rewards)
    mask = list(trainable or [0, 1, 1] * len(rewards))
    known = [reward or 0.0 for reward in rewards]
    options: dict[str, Any] = {"reward": math.fsum(known), "score": 1.0, "stop_reason": StopReason.DONE, **changes}
    return Trajectory(
        token_ids=[t % 2 for t in range(n)],
        trainable=mask,
        logprobs=[-1.0 * own for own in mask],
        versions=[own - 1 for own in mask],
        prompt_length=1,
        turns=[Turn(start=3 * k + 1, end=3 * k + 3, finish_reason="stop", reward=r) for k, r in enumerate(rewards)],
        group_id="g",
        sample_index=number,
        **options,
    )


def group(*rows: Trajectory) -> Group:
    infos = [sample_info(row, max_len=64) for row in rows]
    return Group(prompt=PromptItem(group_id="g", prompt="p"), samples=infos, handle=list(rows))


FOUR = group(episode(0, 1.0, 0.0), episode(1, 1.0, 1.0), episode(2, 0.0, 0.0), episode(3, 0.0, 1.0))


def shape(*groups: Group, mode: Any = "to_go", estimator: str = "dr_grpo", **changes: Any) -> ShapedBatch:
    options: dict[str, Any] = {"shaping": RewardShapingConfig(), "max_response_len": 10, "norm": None, **changes}
    return shape_groups(groups, estimator=estimator, turn_rewards=mode, **options)


def advantages(shaped: ShapedBatch, estimator: str, **options: Any) -> torch.Tensor:
    """Of the trainable tokens, [samples, tokens], by the policy's rank on a model that gives every value 0."""
    algo = AlgoConfig(advantage=AdvantageConfig(estimator=estimator, **options), kl=KLConfig(init_coef=0.0))
    config = toy_config(algo)
    rank = toy_rank(PolicyRank, torch.zeros(2, 2), config)
    shares = [shaped.samples]
    scores = {}
    if algo.advantage.row.critic:
        critic = toy_rank(CriticRank, torch.zeros(2), config)
        scores = {"values": [critic.read(critic.values(shares))]}
    batch = rank.prepare(shares, scores=scores, kl_coef=0.0).batch
    assert batch.advantages is not None
    return batch.advantages[batch.action_mask].reshape(len(shaped.samples), -1)


SECOND = [-0.5, 0.5, -0.5, 0.5]
FIRST = [0.0, 1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "first", "second"),
    [
        ("dr_grpo", FIRST, SECOND),
        ("rloo", [a * 4 / 3 for a in FIRST], [a * 4 / 3 for a in SECOND]),
        ("group_norm", [a * ROOT(3 / 2) for a in FIRST], [a * ROOT(3) for a in SECOND]),
        ("maxrl", FIRST, [a * 2 for a in SECOND]),
        ("reinforce_baseline", [a * ROOT(8 / 3) for a in FIRST], [a * ROOT(8 / 3) for a in SECOND]),
        (
            "reinforce",
            [(g - 0.75) / ROOT(7 / 16) for g in (1, 2, 0, 1)],
            [(g - 0.75) / ROOT(7 / 16) for g in (0, 1, 0, 1)],
        ),
        ("gae", [(g - 0.75) / ROOT(7 / 16) for g in (1, 2, 0, 1)], [(g - 0.75) / ROOT(7 / 16) for g in (0, 1, 0, 1)]),
    ],
)
def test_tokens_of_two_turns_have_the_advantages_of_the_closed_form(
    estimator: str, first: list[float], second: list[float]
) -> None:
    """Whitened ones over all 16 tokens: of (0, 1, -1, 0, -1/2, 1/2, -1/2, 1/2) the variance is 3/8, of the returns
    (1, 2, 0, 1, 0, 1, 0, 1) it is 7/16 around 3/4."""
    found = advantages(shape(FOUR, estimator=estimator), estimator)
    expected = [[a, a, b, b] for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_a_token_discount_counts_tokens_of_the_model() -> None:
    found = advantages(shape(FOUR, estimator="reinforce"), "reinforce", gamma=0.5, no_std_norm=True)
    raw = torch.tensor([[0.5, 1, 0, 0], [0.625, 1.25, 0.5, 1], [0, 0, 0, 0], [0.125, 0.25, 0.5, 1]])
    torch.testing.assert_close(found, raw - raw.mean(), atol=1e-6, rtol=0)


def test_a_turn_discount_counts_turns() -> None:
    """G is (1, 0), (1.5, 1), (0, 0), (0.5, 1)."""
    found = advantages(shape(FOUR, turn_gamma=0.5), "dr_grpo")
    expected = [[0.25, 0.25, -0.5, -0.5], [0.75, 0.75, 0.5, 0.5], [-0.75, -0.75, -0.5, -0.5], [-0.25, -0.25, 0.5, 0.5]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("estimator", ["dr_grpo", "group_norm", "rloo", "gae"])
def test_off_is_one_reward_of_the_episode(estimator: str) -> None:
    off = shape(FOUR, mode="off", estimator=estimator)
    assert all(sample.turn_rewards is None for sample in off.samples)
    bare = group(*(replace(row, turns=[replace(t, reward=None) for t in row.turns]) for row in FOUR.handle))
    same = shape(bare, mode="off", estimator=estimator)
    assert [s.reward for s in off.samples] == [s.reward for s in same.samples]
    assert off.metrics == same.metrics
    assert torch.equal(advantages(off, estimator), advantages(same, estimator))


def test_an_agent_that_rewards_no_turn_rewards_the_last_one() -> None:
    rows = [episode(n, None, None, reward=reward) for n, reward in enumerate((1.0, 0.0))]
    assert [s.turn_rewards for s in shape(group(*rows), estimator="reinforce").samples] == [[0.0, 1.0], [0.0, 0.0]]


def test_shaping_is_about_the_episode_and_its_difference_lies_on_the_last_turn() -> None:
    """Mean 2 and std 1 of the wholes 3 and 1, then clipped to at most 0.5."""
    norm = RunningRewardNorm()
    config = RewardShapingConfig(normalize_enable=True, clip_range=(-10.0, 0.5))
    rows = group(episode(0, 2.0, 1.0), episode(1, 1.0, 0.0))
    shaped = shape(rows, estimator="reinforce", shaping=config, norm=norm)
    assert [s.turn_rewards for s in shaped.samples] == [[2.0, -1.5], [1.0, -2.0]]
    assert shaped.metrics["train/reward"] == 2.0


def test_a_penalty_for_length_lies_on_the_last_turn() -> None:
    config = RewardShapingConfig(overlong_buffer_len=2, overlong_penalty_factor=0.5)
    rows = group(episode(0, 1.0, 0.0), episode(1, 1.0, 1.0))
    shaped = shape(rows, estimator="reinforce", shaping=config, max_response_len=3)
    assert [s.turn_rewards for s in shaped.samples] == [[1.0, -0.25], [1.0, 0.75]]


def test_metrics_tell_of_turns() -> None:
    metrics = shape(group(episode(0, 1.0), episode(1, 0.0, 1.0))).metrics
    assert (metrics["rollout/turns_mean"], metrics["train/turns_alone"]) == (1.5, 1 / 3)


def test_a_failed_sample_is_compared_with_nobody() -> None:
    rows = group(episode(0, 1.0, 1.0), episode(1, 0.0, 0.0), episode(2, 9.0, 9.0))
    failed = replace(rows, samples=[*rows.samples[:2], replace(rows.samples[2], failed=True, reward=None)])
    assert [s.turn_rewards for s in shape(failed).samples] == [[0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (episode(0, 1.0, 0.5, trainable=[0, 1, 1, 0, 0, 0]), "turn 2 earned 0.5 and has no trainable token"),
        (episode(0, 1.0, 0.5, trainable=[0, 1, 1, 1, 1, 1]), "have 4 of 5 trainable tokens"),
    ],
)
def test_a_reward_that_no_token_of_its_turn_can_have_fails_the_sample(row: Trajectory, words: str) -> None:
    found = fail_misplaced(group(row, episode(1, 1.0)))
    assert [s.failed for s in found.samples] == [True, False]
    assert words in found.samples[0].failure
    assert found.samples[0].failure_kind == "agent"


def test_turns_that_are_fine_are_left_alone() -> None:
    fine = group(episode(0, 1.0, 0.0, trainable=[0, 1, 1, 0, 0, 0]), episode(1, None, None))
    assert fail_misplaced(fine) is fine


@pytest.mark.parametrize(("mode", "failed"), [("off", 0.0), ("to_go", 1.0)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_trainer_counts_such_a_sample_as_failed(mode: str, failed: float, asynchronous: bool) -> None:
    def score(item: PromptItem, sample: int) -> Any:
        turns = [(4, float(sample)), (0, 1.0 if item.position == 0 and sample == 0 else 0.0)]
        return replace(GOOD, reward=float(sample), turns=turns)

    flags = {"algo.turn_rewards": mode, "rollout.max_failed_fraction": 0.5, "rollout.n_samples_per_prompt": 3}
    run = fake_run(2, score=score, **flags, **{"train.async_enable": asynchronous, "train.batch_size": 6})
    run.run()
    assert run.sink.steps[0]["rollout/failed_samples_agent"] == failed
    assert len(run.trained()) == 6 - failed
    credited = [s.turn_rewards for batch in run.learner.prepared for part in batch for s in part]
    assert all((found is None) == (mode == "off") for found in credited)


def test_the_share_of_a_long_sample_that_is_cut_keeps_its_rewards() -> None:
    row = cut(episode(0, 0.5, 0.25, 0.25), 4)
    assert [(t.start, t.end, t.reward) for t in row.turns] == [(1, 3, 0.5)]
    assert sample_info(episode(0, 0.5, 0.25, 0.25), max_len=5).turns == [(2, 0.5), (1, 0.25)]


def test_a_record_keeps_the_rewards_of_turns() -> None:
    turns = [Turn(start=1, end=2, finish_reason="stop", reward=0.1), Turn(start=2, end=3, finish_reason="stop")]
    (again,) = samples_of(table_of([sample(1, 0, turns=turns)]))
    assert again.turns == turns
    assert again.trajectory().turns == turns
