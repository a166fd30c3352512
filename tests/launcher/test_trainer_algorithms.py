"""The trainer with real shaping, advantages, losses and steps, on tables for models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.samples import SampleInfo, SampleRef
from openrlhf.launcher.trainer.loop import Trainer, TrainerParts
from support.toy_ranks import ToyRanks, ToyRollout, toy_ranks
from support.trainer_fakes import FAILED, GOOD, FakeLearner, FakePrompts, FakeSink, fake_run

REF = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
REWARD = [0.0, 0.2, 0.5, 1.0]


def toy_run(
    steps: int, *, lr: float, reward: Callable[[list[int]], float], length: int = 1, **flags: Any
) -> tuple[Trainer, ToyRanks, FakeSink]:
    """One prompt per step; the policy starts at the reference."""
    n = flags.get("rollout.n_samples_per_prompt", 4)
    defaults = {
        "rollout.batch_size": 1,
        "rollout.n_samples_per_prompt": n,
        "train.batch_size": n,
        "reward.remote_url": "reward.py",
        "ckpt.output_dir": "/exported",
    }
    config = build(TrainPPOConfig(), defaults | flags)
    ranks = toy_ranks(config, REF.expand(4, 4), lr=lr)
    sink = FakeSink()
    rollout = ToyRollout(ranks.policy, n=n, length=length, reward=reward)
    parts = TrainerParts(rollout=rollout, learner=ranks, prompts=FakePrompts(steps), sink=sink)
    trainer = Trainer(config, parts)
    asyncio.run(asyncio.wait_for(trainer.run(), 600))
    return trainer, ranks, sink


TRAIN = """
    policy_loss entropy_loss critic_loss values kl logprobs_diff ppo_kl ppo_clip_ratio vllm_kl reward score return
    group_reward_std response_clip_ratio response_length total_length truncated actor_lr actor_grad_norm critic_lr
    critic_grad_norm dynamic_filtering_pass_rate total is_filter_ratio advantage_mean advantage_std advantage_min
    advantage_max skipped_steps reward_shaped kl_coef
"""
TIMING = "make_experience ppo_train broadcast generation step_total"
ROLLOUT = """
    reward_mean reward_std response_length_mean truncated_rate num_samples failed_samples failed_samples_agent
    failed_samples_reward failed_samples_engine failed_samples_timeout dropped_groups sync_error staleness_mean
    staleness_max
"""


@pytest.mark.parametrize("use_loss", [False, True])
def test_every_metric_of_the_dashboards_is_logged(use_loss: bool) -> None:
    """`total` stands for the extra logs of a reward function or an agent."""
    _, _, sink = toy_run(
        2,
        lr=0.1,
        reward=lambda tokens: REWARD[tokens[0]],
        length=2,
        **{
            "actor.entropy_coef": 0.0,
            "algo.kl.use_loss": use_loss,
            "algo.kl.estimator": "k3" if use_loss else "k1",
            "algo.advantage.is_correction_enable": True,
            "algo.dynamic_filtering_enable": True,
            "rollout.n_samples_per_prompt": 16,
        },
    )
    wanted = {f"train/{n}" for n in TRAIN.split()} | {f"timing/{n}" for n in TIMING.split()}
    wanted |= {f"rollout/{n}" for n in ROLLOUT.split()}
    for step in sink.steps:
        assert wanted <= step.keys(), wanted - step.keys()
        assert all(math.isfinite(value) for value in step.values())
    assert sink.samples[0][1][0].startswith("[0, ")
    assert sink.steps[0]["train/logprobs_diff"] == pytest.approx(0.0, abs=1e-6)  # B026, B130


def test_trainer_ends_at_the_optimum_of_reward_minus_kl() -> None:
    tail: list[torch.Tensor] = []

    def reward(tokens: list[int]) -> float:
        return REWARD[tokens[0]]

    config = {
        "algo.advantage.estimator": "rloo",
        "algo.kl.init_coef": 0.5,
        "rollout.n_samples_per_prompt": 64,
    }
    _, ranks, _ = toy_run(200, lr=1.0, reward=reward, **config)
    learner: Any = ranks.policy.learner
    tables = REF.expand(4, 4).clone()
    for gradient in learner.gradients:
        tables = tables - gradient
        tail.append(tables[0].softmax(-1))
    optimum = (REF + torch.tensor(REWARD, dtype=torch.float64) / 0.5).softmax(-1)
    assert float((torch.stack(tail[60:]).mean(0) - optimum).abs().max()) < 5e-3


@pytest.mark.parametrize(("use_loss", "estimator"), [(False, "k1"), (True, "k2")])
def test_adaptive_coefficient_is_part_of_the_state(use_loss: bool, estimator: str) -> None:
    flags: dict[str, Any] = {"algo.kl.target": 1e-6, "algo.kl.horizon": 100, "algo.kl.init_coef": 0.1}
    flags |= {"algo.advantage.estimator": "rloo", "algo.kl.use_loss": use_loss, "algo.kl.estimator": estimator}
    trainer, _, sink = toy_run(4, lr=2.0, reward=lambda tokens: REWARD[tokens[0]], **flags)
    seen = [step["train/kl_coef"] for step in sink.steps]
    assert seen[-1] != 0.1
    # every step: times 1 +- 0.2 * 4 samples / horizon 100
    factors = {round(b / a, 9) for a, b in zip([0.1, *seen], seen, strict=False)}
    assert factors <= {1.008, 0.992}
    again = Trainer(trainer.config, trainer.parts)
    again.kl.load_state_dict(trainer.state_dict()["kl"])
    assert again.kl.value == seen[-1]


def info(reward: float, **changes: Any) -> SampleInfo:
    return replace(GOOD, reward=reward, score=0.5, **changes)


def shaped(rewards: list[SampleInfo], **flags: Any) -> tuple[list[float], dict[str, float]]:
    """Rewards that are trained on, by sample, and the metrics, of one group."""

    def score(item: PromptItem, sample: int) -> SampleInfo:
        return rewards[sample]

    flags = {"rollout.n_samples_per_prompt": len(rewards), "algo.advantage.estimator": "reinforce"} | flags
    run = fake_run(1, score=score, **flags)
    run.run()
    found = {s.position: s.reward for part in run.learner.prepared[0] for s in part}
    return [found.get(i, math.nan) for i in range(len(rewards))], run.sink.steps[0]


# The order: normalise, clip, overlong, stop-properly, baseline. Any two swapped give other numbers.
def test_order_of_shaping() -> None:
    samples = [
        info(10.0, longest_turn=90),
        info(2.0),
        info(0.0, truncated=True, stop_reason="length", longest_turn=100),
    ]
    flags = {
        "reward.normalize_enable": True,
        "reward.clip_range": (-1.0, 1.0),
        "reward.overlong_buffer_len": 20.0,
        "reward.overlong_penalty_factor": 0.5,
        "reward.stop_properly_penalty_coef": 0.5,
        "rollout.max_new_tokens": 100,
    }
    std = math.sqrt((6**2 + 2**2 + 4**2) / 3)
    expected = [1.0 - 0.25, -2 / std, (-4 / std - 0.5) * 0.5]
    found, metrics = shaped(samples, **flags)
    assert found == pytest.approx(expected, abs=1e-6)
    assert metrics["train/reward"] == pytest.approx(4.0)
    assert metrics["train/reward_shaped"] == pytest.approx(sum(expected) / 3)
    mean = sum(expected) / 3
    found, _ = shaped(samples, **flags, **{"algo.advantage.estimator": "reinforce_baseline"})
    assert found == pytest.approx([r - mean for r in expected], abs=1e-6)


# B021: a stop token or string of its own is a proper end, and so is a turn limit; only length is punished
@pytest.mark.parametrize(
    ("reason", "cut_off", "expected"),
    [("stop", False, 1.0), ("done", False, 1.0), ("max_turns", True, 1.0), ("length", True, -0.5)],
)
def test_stop_properly_punishes_length_only(reason: str, cut_off: bool, expected: float) -> None:
    found, metrics = shaped(
        [info(1.0, stop_reason=reason, truncated=cut_off)], **{"reward.stop_properly_penalty_coef": -0.5}
    )
    assert found == [expected]
    assert metrics["train/reward"] == 1.0
    assert metrics["train/reward_shaped"] == expected
    assert metrics["train/truncated"] == float(cut_off)


def test_overlong_is_about_the_longest_turn() -> None:
    flags: dict[str, Any] = {"reward.overlong_buffer_len": 20.0, "rollout.max_new_tokens": 100}
    several = info(1.0, num_trainable=180, longest_turn=80, total_length=300)
    assert shaped([several, info(1.0, num_trainable=90, longest_turn=90)], **flags)[0] == pytest.approx([1.0, 0.5])


def test_without_a_limit_per_call_overlong_is_about_the_whole_sample() -> None:
    flags: dict[str, Any] = {"reward.overlong_buffer_len": 20.0, "data.max_len": 200}
    assert shaped([info(1.0, longest_turn=190)], **flags)[0] == pytest.approx([0.5])


def test_failed_sample_is_in_no_statistic() -> None:  # B014
    found, metrics = shaped(
        [info(1.0), FAILED, info(3.0)],
        **{
            "algo.advantage.estimator": "group_norm",
            "rollout.max_failed_fraction": 0.5,
            "reward.normalize_enable": True,
        },
    )
    assert found[0] == pytest.approx(-math.sqrt(0.5), abs=1e-6)
    assert math.isnan(found[1])
    assert found[2] == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert metrics["train/reward"] == 2.0


def test_normalisation_starts_from_the_reward_models_own_statistics() -> None:
    def score(item: PromptItem, sample: int) -> SampleInfo:
        return replace(GOOD, reward=None, score=None)

    def first_rewards(stored: tuple[float, float] | None) -> list[float]:
        learner = FakeLearner(rewards=lambda s: 4.0 + 2.0 * s.position, stored=stored)
        flags = {
            "reward.remote_url": None,
            "reward.model_name_or_path": "rm",
            "reward.normalize_enable": True,
            "algo.advantage.estimator": "reinforce",
            "rollout.batch_size": 1,
        }
        run = fake_run(1, score=score, learner=learner, **flags)
        run.run()
        samples: list[SampleRef] = run.learner.prepared[0][0]
        return [s.reward for s in sorted(samples, key=lambda s: s.position)]

    assert first_rewards(None) == pytest.approx([-1.0, 1.0], abs=1e-6)
    # two rewards beside the 1000 that stored statistics count for: mean 0 + 10/1002, sum of squares 4e3 + 52 - 100/1002
    mean = 10 / 1002
    std = math.sqrt((4.0 * 1000 + 16 + 36) / 1002 - mean**2)
    assert first_rewards((0.0, 2.0)) == pytest.approx([(4 - mean) / std, (6 - mean) / std], abs=1e-5)


def test_scores_default_to_rewards_in_the_log() -> None:
    _, metrics = shaped([info(1.0), replace(info(3.0), score=None)])
    assert metrics["train/score"] == pytest.approx((0.5 + 3.0) / 2)


def test_normaliser_is_part_of_the_state() -> None:
    run = fake_run(2, reward__normalize_enable=True)
    run.run()
    state = run.trainer.state_dict()["reward_norm"]
    assert (state["count"], state["mean"]) == (4, 0.5)


def test_skipped_steps_of_all_epochs_are_counted() -> None:
    from openrlhf.launcher.trainer.step_metrics import over_epochs

    epochs = [{"train/skipped_steps": 1.0, "train/policy_loss": 1.0}, {"train/skipped_steps": 2.0, "train/kl": 4.0}]
    assert over_epochs(epochs) == {"train/skipped_steps": 3.0, "train/policy_loss": 1.0, "train/kl": 4.0}
