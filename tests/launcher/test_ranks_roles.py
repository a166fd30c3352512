"""One rank's part of a step, by hand: KL, rewards per token, advantages, what is scored, metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from openrlhf.core.config import AdvantageConfig, AlgoConfig, KLConfig, PolicyLossConfig
from openrlhf.core.tables import POLICY_LOSSES
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.ranks.batches import RankBatch, combine_sums, metric_names, scatter_trainable
from openrlhf.launcher.ranks.config import rank_config
from openrlhf.launcher.ranks.roles import CriticRank, PolicyRank, Rank, ReferenceRank
from support.toy_ranks import ToyLearner, references, sampled, toy_config, toy_rank

# Log-probs after token 0: the policy's minus the reference's are 0.2 for token 1.
POLICY = torch.tensor([[0.0, math.log(0.5 * math.exp(0.2) / (1 - 0.5 * math.exp(0.2)))], [0.0, 0.0]])
REFERENCE = torch.zeros(2, 2)
NO_KL = KLConfig(init_coef=0.0)


def algo(estimator: str = "rloo", kl: KLConfig = NO_KL, **options: Any) -> AlgoConfig:
    return AlgoConfig(advantage=AdvantageConfig(estimator=estimator, **options), kl=kl)


def prepared(
    config: AlgoConfig,
    *,
    kl_coef: float = 0.0,
    with_reference: bool = True,
    rewards: tuple[float, ...] = (1.0,),
    **options: Any,
) -> tuple[PolicyRank, RankBatch, dict[str, float]]:
    """A policy rank and a batch that it prepared, of samples of one sampled token, which comes after token 0."""
    own = toy_config(config, **options)
    rank = toy_rank(PolicyRank, POLICY, own)
    rows = [sampled([0, 1]) for _ in rewards]
    shares = [references(rows, rewards)]
    reference = toy_rank(ReferenceRank, REFERENCE, own)
    scores = {"ref_logprobs": [reference.logprobs(shares)]} if with_reference else {}
    batch = rank.prepare(shares, scores=scores, kl_coef=kl_coef)
    return rank, batch, combine_sums([rank.metrics(batch)])


def learner(rank: Rank) -> ToyLearner:
    found: Any = rank.learner
    return found


# B027: the KL is in the rewards or in the loss, never in both; without a coefficient there is none
@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.2), ("k2", 0.02), ("k3", math.exp(-0.2) - 0.8)])
def test_kl_as_a_penalty_is_in_the_rewards_only(estimator: Any, value: float) -> None:
    rank, batch, metrics = prepared(algo(kl=KLConfig(init_coef=0.1, estimator=estimator)), kl_coef=0.1)
    assert metrics["train/kl"] == pytest.approx(value, abs=1e-6)
    assert metrics["train/return"] == pytest.approx(1.0 - 0.1 * value, abs=1e-6)
    assert metrics["train/advantage_mean"] == pytest.approx(1.0 - 0.1 * value, abs=1e-6)
    assert "kl_loss" not in rank.objective(batch.batch, 0.1).counts(batch.batch)
    assert "train/kl" not in rank.update(batch, [0], kl_coef=0.1)


def test_kl_as_a_loss_is_in_the_loss_only() -> None:
    kl = KLConfig(init_coef=0.1, use_loss=True, estimator="k2")
    rank, batch, metrics = prepared(algo(kl=kl), kl_coef=0.1)
    assert metrics["train/return"] == 1.0
    assert "train/kl" not in metrics
    assert combine_sums([rank.update(batch, [0], kl_coef=0.1)])["train/kl"] == pytest.approx(0.02, abs=1e-6)
    # d/dlogits of (-A logp + 0.1 * logratio^2 / 2), A = 1: (0.1 * 0.2 - 1) (onehot - p)
    p = POLICY[0].softmax(-1)
    expected = (0.1 * 0.2 - 1.0) * (torch.tensor([0.0, 1.0]) - p)
    assert torch.allclose(learner(rank).gradients[0][0], expected, atol=1e-6)


@pytest.mark.parametrize("use_loss", [False, True])
def test_no_coefficient_no_kl(use_loss: bool) -> None:
    kl = KLConfig(init_coef=0.0, use_loss=use_loss, estimator="k3")
    rank, batch, metrics = prepared(algo(kl=kl), with_reference=False)
    assert metrics["train/kl"] == 0.0
    assert metrics["train/return"] == 1.0
    assert learner(rank).scored == 0
    assert "train/kl" not in rank.update(batch, [0], kl_coef=0.0)


@pytest.mark.parametrize(
    ("epochs", "shares", "kl", "scored"),
    [(1, 1, NO_KL, 0), (1, 2, NO_KL, 1), (2, 1, NO_KL, 1), (1, 1, KLConfig(init_coef=0.1), 1)],
)
def test_old_logprobs_are_computed_where_they_are_needed(epochs: int, shares: int, kl: KLConfig, scored: int) -> None:
    own = toy_config(algo(kl=kl))
    rank = toy_rank(PolicyRank, POLICY, own, max_epochs=epochs)
    parts = [references([sampled([0, 1])], [1.0]) for _ in range(shares)]
    reference = toy_rank(ReferenceRank, REFERENCE, own)
    scores = {"ref_logprobs": [reference.logprobs(parts)]} if kl.init_coef else {}
    rank.prepare(parts, scores=scores, kl_coef=0.1)
    assert learner(rank).scored == scored


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_skipping_the_old_logprobs_equals_the_long_way(loss: Any) -> None:
    correction = {"is_correction_enable": True, "is_correction_threshold": (0.1, 5.0)}
    results = []
    for force in (False, True):
        rank, batch, _ = prepared(
            algo(**correction),
            with_reference=False,
            rewards=(1.0, -0.5),
            policy_loss=PolicyLossConfig(policy_loss_type=loss, entropy_coef=0.01),
            force_old_logprobs=force,
        )
        metrics = combine_sums([rank.update(batch, [0], kl_coef=0.0)])
        assert learner(rank).scored == int(force)
        assert metrics["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
        results.append((metrics, learner(rank).gradients[0]))
    (short, short_gradient), (long, long_gradient) = results
    assert short == pytest.approx(long, abs=1e-6)
    assert float((short_gradient - long_gradient).abs().max()) < 1e-6
    assert float(short_gradient.abs().max()) > 0.01


@pytest.mark.parametrize(
    ("estimator", "no_std_norm", "expected"),
    [
        ("reinforce", False, [1.0, -1.0]),
        ("reinforce", True, [0.75, -0.75]),
        ("reinforce_baseline", False, [1.0, -1.0]),
        ("rloo", False, [2.0, 0.5]),
        ("group_norm", False, [2.0, 0.5]),
        ("dr_grpo", False, [2.0, 0.5]),
    ],
)
def test_whitening_is_for_three_estimators(estimator: Any, no_std_norm: bool, expected: list[float]) -> None:
    _, batch, metrics = prepared(algo(estimator, no_std_norm=no_std_norm), with_reference=False, rewards=(2.0, 0.5))
    assert batch.batch.advantages is not None
    assert batch.batch.advantages[:, 1].tolist() == pytest.approx(expected)
    assert metrics["train/advantage_mean"] == pytest.approx(sum(expected) / 2, abs=1e-6)
    assert metrics["train/advantage_std"] == pytest.approx((max(expected) - min(expected)) / 2, abs=1e-6)
    assert (metrics["train/advantage_min"], metrics["train/advantage_max"]) == pytest.approx(
        (min(expected), max(expected))
    )


def test_critic_learns_returns_that_are_not_whitened() -> None:
    own = toy_config(algo("gae", lambd=1.0))
    policy, critic = toy_rank(PolicyRank, POLICY, own), toy_rank(CriticRank, torch.tensor([0.25, 0.5]), own)
    shares = [references([sampled([0, 1, 1]), sampled([0, 0])], [1.0, 0.0])]
    valued = critic.values(shares)
    batch = policy.prepare(shares, scores={"values": [critic.read(valued)]}, kl_coef=0.0)
    returns = policy.returns(batch)
    ready = critic.prepare(valued, returns=[returns])
    assert [returns[0].tolist(), returns[1].tolist()] == [[1.0, 1.0], [0.0]]
    advantages = combine_sums([policy.metrics(batch)])
    assert advantages["train/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert advantages["train/advantage_std"] == pytest.approx(1.0, abs=1e-6)
    metrics = combine_sums([critic.update(ready, [0])])
    assert metrics["train/critic_loss"] == pytest.approx(0.5 * (0.75**2 + 0.5**2 + 0.25**2) / 3)
    assert metrics["train/values"] == pytest.approx(1.0 / 3)
    assert {"train/critic_lr", "train/critic_grad_norm", "train/critic_skipped_steps"} <= metrics.keys()


def test_frozen_steps_are_left_out() -> None:
    own = toy_config(algo())
    rank = toy_rank(PolicyRank, POLICY, own)
    shares = [references([sampled([0, 1])], [1.0]), references([sampled([0, 1])], [1.0])]
    batch = rank.prepare(shares, scores={}, kl_coef=0.0)
    assert rank.update(batch, [0, 1], kl_coef=0.0, freeze=[True, True]) == {}
    rank.update(batch, [0, 1], kl_coef=0.0, freeze=[True, False])
    assert len(learner(rank).gradients) == 1


@pytest.mark.parametrize(("max_new_tokens", "expected"), [(100, 100.0), (None, 2048.0)])
def test_constant_length_of_dr_grpo(max_new_tokens: int | None, expected: float) -> None:
    config = build(TrainPPOConfig(), {"rollout.max_new_tokens": max_new_tokens})
    assert rank_config(config, pad_token_id=0).agg_constant == expected


def test_advantage_metrics_of_several_ranks() -> None:
    def sums(advantages: list[float]) -> dict[str, tuple[float, float]]:
        rank = toy_rank(PolicyRank, POLICY, toy_config(algo()))
        rows = [sampled([0, 1]) for _ in advantages]
        return rank.metrics(rank.prepare([references(rows, advantages)], scores={}, kl_coef=0.0))

    together = combine_sums([sums([1.0, 4.0]), sums([]), sums([-2.0])])
    values = torch.tensor([1.0, 4.0, -2.0], dtype=torch.float64)
    assert together["train/advantage_mean"] == pytest.approx(float(values.mean()))
    assert together["train/advantage_std"] == pytest.approx(float(values.std(correction=0)))
    assert (together["train/advantage_min"], together["train/advantage_max"]) == (-2.0, 4.0)
    assert together["train/return"] == pytest.approx(1.0)


def test_skipped_steps_are_counted_not_averaged() -> None:
    names = metric_names({"skipped_steps": (2.0, 4.0), "grad_norm": (8.0, 4.0)}, "policy")
    assert combine_sums([names]) == {"train/skipped_steps": 2.0, "train/actor_grad_norm": 2.0}


def test_scores_of_other_ranks_land_on_the_trainable_tokens() -> None:
    rank = toy_rank(PolicyRank, POLICY, toy_config(algo()))
    batch = rank.load([references([sampled([0, 1, 0], start=2), sampled([0, 1])], [0.0, 0.0])]).batch
    parts = [{1: torch.tensor([-3.0])}, {0: torch.tensor([-2.0])}]
    assert scatter_trainable(batch, parts).tolist() == [[0.0, 0.0, -2.0], [0.0, -3.0, 0.0]]


def test_clip_cov_takes_the_gradient_from_the_tokens_it_draws() -> None:
    def advantages(**options: Any) -> tuple[list[list[float]], dict[str, float], int]:
        own = toy_config(algo("reinforce"), PolicyLossConfig(**options))
        rank = toy_rank(PolicyRank, torch.tensor([[0.0, 3.0], [0.0, 0.0]]), own)
        rows = [sampled([0, 1]), sampled([0, 0]), sampled([0, 1]), sampled([0, 0])]
        batch = rank.prepare([references(rows, (1.0, -1.0, 1.0, -1.0))], scores={}, kl_coef=0.0)
        assert batch.batch.advantages is not None
        return batch.batch.advantages.tolist(), combine_sums([rank.metrics(batch)]), learner(rank).scored

    # Log-probs -0.05 and -3.05, advantages 1 and -1: every token's part of the covariance is 1.5.
    plain, metrics, scored = advantages()
    assert plain == [[0.0, 1.0], [0.0, -1.0], [0.0, 1.0], [0.0, -1.0]]
    assert "train/clip_cov" not in metrics
    assert scored == 0
    every, metrics, scored = advantages(clip_cov_share=1.0)
    assert every == [[0.0, 0.0]] * 4
    assert (metrics["train/clip_cov"], scored) == (1.0, 1)
    outside, metrics, _ = advantages(clip_cov_share=1.0, clip_cov_range=(1.6, 5.0))
    assert outside == plain
    assert metrics["train/clip_cov"] == 0.0
