"""What must hold for any mask and shape."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.core.advantages import compute_advantages, whiten
from openrlhf.core.config import (
    AdvantageConfig,
    CorrectionType,
    PolicyLossConfig,
)
from openrlhf.core.losses.aggregate import aggregate, loss_count
from openrlhf.core.losses.policy import policy_loss
from openrlhf.core.rewards import group_baseline, token_rewards
from openrlhf.core.tables import ESTIMATORS, LossAggMode
from support.core_helpers import NAN, check, gradient

GROUPS = tuple(name for name, row in ESTIMATORS.items() if row.groups)
PROFILE = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 10_000)
masks = st.tuples(st.integers(0, 5), st.integers(0, 7), st.floats(0, 1), seeds).map(
    lambda a: torch.rand(a[0], a[1], generator=torch.Generator().manual_seed(a[3])) < a[2]
)
modes = st.sampled_from(get_args(LossAggMode))
estimators = st.sampled_from(tuple(ESTIMATORS))


def like(m: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    """Random numbers on the mask, NaN off it."""
    x = torch.randn(m.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale
    return torch.where(m, x, torch.full_like(x, NAN))


@PROFILE
@given(m=masks, mode=modes, seed=seeds)
def test_aggregate_is_the_mean_over_units(m: Tensor, mode: LossAggMode, seed: int) -> None:
    x = like(m, seed)
    per_row = [[float(v) for v, on in zip(row, keep, strict=True) if on] for row, keep in zip(x, m, strict=True)]
    per_row = [row for row in per_row if row]
    expected = {
        "token-mean": math.fsum(v for row in per_row for v in row),
        "seq-mean-token-mean": math.fsum(math.fsum(row) / len(row) for row in per_row),
        "seq-mean-token-sum-norm": math.fsum(math.fsum(row) / 7.0 for row in per_row),
    }[mode]
    assert abs(float(aggregate(x, m, mode, 7.0)) - expected) < 1e-9
    assert loss_count(m, mode) == (sum(map(len, per_row)) if mode == "token-mean" else len(per_row))


@PROFILE
@given(
    m=masks,
    mode=modes,
    kind=st.sampled_from([None, *get_args(CorrectionType)]),
    gspo=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    seed=seeds,
)
def test_policy_loss_is_finite_and_blind_to_the_mask(
    m: Tensor, mode: LossAggMode, kind: CorrectionType | None, gspo: bool, scale: float, seed: int
) -> None:
    config = PolicyLossConfig(loss_agg_mode=mode)
    if gspo:
        config = PolicyLossConfig(policy_loss_type="gspo")
    correction = AdvantageConfig(is_correction_enable=kind is not None)
    if kind is not None:
        correction = replace(correction, is_correction_type=kind)
    logp = like(m, seed, scale).requires_grad_()
    out = policy_loss(
        logprobs=logp, old_logprobs=like(m, seed + 1, scale), rollout_logprobs=like(m, seed + 2, scale),
        advantages=like(m, seed + 3), action_mask=m, config=config, correction=correction,
    )  # fmt: skip
    assert out.total.isfinite()
    grad = gradient(out.total, logp)
    assert grad.isfinite().all()
    assert (grad[~m] == 0).all()
    for total, count in out.metrics.values():
        assert math.isfinite(float(total))
        assert count >= 0


@PROFILE
@given(m=masks, estimator=estimators, lambd=st.floats(0, 1), seed=seeds)
def test_advantages_live_on_the_mask(m: Tensor, estimator: str, lambd: float, seed: int) -> None:
    rewards, values = like(m, seed), like(m, seed + 1)
    advantages, returns = compute_advantages(estimator, rewards, m, values, 1.0, lambd)
    assert advantages.isfinite().all()
    assert (advantages[~m] == 0).all()
    assert (returns[~m] == 0).all()
    if estimator == "gae":
        assert ((returns - advantages - values)[m].abs() < 1e-12).all()
        monte_carlo, _ = compute_advantages("reinforce", rewards, m)
        full, _ = compute_advantages("gae", rewards, m, values, 1.0, 1.0)
        assert ((full + values - monte_carlo)[m].abs() < 1e-9).all()


@PROFILE
@given(m=masks, seed=seeds)
def test_whitened_tokens_have_mean_zero_and_variance_one(m: Tensor, seed: int) -> None:
    x = whiten(like(m, seed), m)
    assert (x[~m] == 0).all()
    n = int(m.sum())
    if n >= 2:
        assert abs(float(x.sum()) / n) < 1e-9
        assert abs(float(x.square().sum()) / n - 1) < 1e-6


@PROFILE
@given(m=masks, coef=st.floats(0, 1), seed=seeds)
def test_token_rewards_sum_to_reward_minus_kl(m: Tensor, coef: float, seed: int) -> None:
    reward = torch.randn(len(m), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    kl = like(m, seed + 1)
    out = token_rewards(reward, kl, coef, m)
    expected = torch.where(m.any(-1), reward, torch.zeros_like(reward)) - coef * torch.nan_to_num(kl, nan=0.0).sum(-1)
    check(out.sum(-1), expected, 1e-9)
    assert (out[~m] == 0).all()


@PROFILE
@given(
    estimator=st.sampled_from(GROUPS),
    samples=st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.just(NAN), st.floats(-1e6, 1e6)), st.booleans()), max_size=24
    ),
)
def test_group_baseline_of_any_samples(estimator: str, samples: list[tuple[int, float, bool]]) -> None:
    ids = [s[0] for s in samples]
    rewards = torch.tensor([s[1] for s in samples], dtype=torch.float64)
    valid = torch.tensor([s[2] for s in samples], dtype=torch.bool)
    result = group_baseline(estimator, rewards, ids, valid)
    assert result.rewards.isfinite().all()
    assert (result.rewards[~result.keep] == 0).all()
    survivors = {g: sum(i == g and v and not math.isnan(r) for i, r, v in samples) for g in ids}
    assert result.dropped_groups == sum(n < 2 for n in survivors.values())
    for group in survivors:
        inside = torch.tensor([i == group for i in ids])
        assert abs(float(result.rewards[inside].sum())) < 1e-6 * max(1.0, float(result.rewards.abs().max()))
        assert int(result.keep[inside].sum()) == (survivors[group] if survivors[group] >= 2 else 0)


@PROFILE
@given(
    estimator=st.sampled_from(GROUPS),
    episodes=st.lists(st.tuples(st.integers(0, 2), st.floats(-1e3, 1e3), st.integers(1, 4)), min_size=1, max_size=10),
)
def test_branches_change_nothing_for_other_episodes(estimator: str, episodes: list[tuple[int, float, int]]) -> None:
    """Any number of branches with the reward of their episode against one sample per episode."""
    plain = group_baseline(
        estimator, torch.tensor([r for _, r, _ in episodes], dtype=torch.float64), [g for g, _, _ in episodes]
    )
    rows = [(number, g, r) for number, (g, r, branches) in enumerate(episodes) for _ in range(branches)]
    numbers = [number for number, _, _ in rows]
    rewards = torch.tensor([r for _, _, r in rows], dtype=torch.float64)
    branched = group_baseline(estimator, rewards, [g for _, g, _ in rows], episodes=numbers)
    assert torch.equal(branched.rewards, plain.rewards[numbers])
    assert torch.equal(branched.keep, plain.keep[numbers])
    assert (branched.dropped_groups, branched.group_std) == (plain.dropped_groups, plain.group_std)
