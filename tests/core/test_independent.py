"""Every formula once more in plain Python (float64, loops, no tensors), compared on random samples with gaps."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.core.advantages import compute_advantages, whiten
from openrlhf.core.config import (
    AdvantageConfig,
    CorrectionType,
    KLEstimator,
    PolicyLossConfig,
)
from openrlhf.core.losses.policy import kl_loss, policy_loss
from openrlhf.core.losses.value import value_loss
from openrlhf.core.rewards import group_baseline, token_rewards
from openrlhf.core.tables import ESTIMATORS, LossAggMode
from support.core_helpers import mean, metric_means

Rows = list[list[float]]
SETTINGS = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 100_000)


class Numbers:
    """Random rows [4, 6]; one row has no trainable token."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mask = [[self.random.random() < 0.6 for _ in range(6)] for _ in range(4)]
        self.mask[seed % 4] = [False] * 6

    def rows(self, scale: float = 1.0) -> Rows:
        return [[self.random.gauss(0, scale) for _ in range(6)] for _ in range(4)]


def tensor(rows: Rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def masked(row: list[float], on: list[bool]) -> list[float]:
    return [x for x, m in zip(row, on, strict=True) if m]


def policy_by_hand(
    numbers: Numbers, data: dict[str, Rows], config: PolicyLossConfig, kind: CorrectionType | None
) -> tuple[float, dict[str, float]]:
    """(mean loss, metrics) from the papers' formulas, token by token."""
    low, high = config.eps_clip_low_high or (config.eps_clip, config.eps_clip)
    per_row, clipped, rejected, tokens, kl = [], 0, 0, 0, 0.0
    for b, on in enumerate(numbers.mask):
        if not any(on):
            continue
        new, old, roll, adv = (masked(data[k][b], on) for k in ("new", "old", "roll", "adv"))
        n = len(new)
        log_w = [o - r for o, r in zip(old, roll, strict=True)]
        s = math.exp(math.fsum(log_w) / n)
        losses = []
        for t in range(n):
            log_ratio = new[t] - old[t]
            if config.policy_loss_type == "gspo":
                log_ratio = math.fsum(a - c for a, c in zip(new, old, strict=True)) / n
            ratio = math.exp(clamp(log_ratio, -20, 20))
            plain, bounded = ratio * adv[t], clamp(ratio, 1 - low, 1 + high) * adv[t]
            objective = min(plain, bounded)
            clipped += bounded < plain
            if config.dual_clip is not None and adv[t] < 0:
                objective = max(objective, config.dual_clip * adv[t])
            w, weight = (s if config.policy_loss_type == "gspo" else math.exp(log_w[t])), 1.0
            if kind == "tis":
                weight = clamp(w, 0.7, 1.4)
            elif kind == "icepop":
                weight = w if 0.7 <= w <= 1.4 else 0.0
            elif kind == "seq-mask-tis":
                weight = clamp(w, 0.7, 1.4) if 0.7 <= s <= 1.4 else 0.0
            rejected += weight == 0.0
            losses.append(-objective * weight)
            kl += old[t] - new[t]
        tokens += n
        per_row.append(losses)
    mode = "seq-mean-token-mean" if config.policy_loss_type == "gspo" else config.loss_agg_mode
    total = {
        "token-mean": math.fsum(map(math.fsum, per_row)) / tokens,
        "seq-mean-token-mean": math.fsum(math.fsum(row) / len(row) for row in per_row) / len(per_row),
        "seq-mean-token-sum-norm": math.fsum(math.fsum(row) / 9.0 for row in per_row) / len(per_row),
    }[mode]
    return total, {"ppo_clip_ratio": clipped / tokens, "is_filter_ratio": rejected / tokens, "ppo_kl": kl / tokens}


VARIANTS = [
    PolicyLossConfig(loss_agg_mode=mode, dual_clip=dual, eps_clip_low_high=clip, policy_loss_type=kind)
    for kind, mode, dual, clip in product(("ppo", "gspo"), get_args(LossAggMode), (None, 1.2), (None, (0.1, 0.3)))
    if kind == "ppo" or mode == "token-mean"
]


@pytest.mark.parametrize("correction", [None, *get_args(CorrectionType)])
@pytest.mark.parametrize("seed", range(6))
def test_policy_loss(correction: CorrectionType | None, seed: int) -> None:
    numbers = Numbers(seed)
    data = {"new": numbers.rows(), "adv": numbers.rows()}
    data["old"] = [[x + numbers.random.gauss(0, 0.4) for x in row] for row in data["new"]]
    data["roll"] = [[x + numbers.random.gauss(0, 0.4) for x in row] for row in data["old"]]
    fix = AdvantageConfig(is_correction_enable=correction is not None, is_correction_threshold=(0.7, 1.4))
    if correction is not None:
        fix = replace(fix, is_correction_type=correction)
    for config in VARIANTS:
        out = policy_loss(
            logprobs=tensor(data["new"]),
            old_logprobs=tensor(data["old"]),
            rollout_logprobs=tensor(data["roll"]),
            advantages=tensor(data["adv"]),
            action_mask=torch.tensor(numbers.mask),
            config=config,
            correction=fix,
            agg_constant=9.0,
        )
        expected, metrics = policy_by_hand(numbers, data, config, correction)
        assert mean(out) == pytest.approx(expected, abs=1e-12), config
        found = metric_means(out)
        assert found["policy_loss"] == pytest.approx(expected, abs=1e-12)
        assert all(found.get(name, 0.0) == pytest.approx(value, abs=1e-12) for name, value in metrics.items())


@SETTINGS
@given(seed=seeds, clip=st.one_of(st.none(), st.floats(0.05, 2.0)))
def test_value_loss(seed: int, clip: float | None) -> None:
    numbers = Numbers(seed)
    new, old, target = numbers.rows(), numbers.rows(), numbers.rows()
    errors = []
    for b, t in product(range(4), range(6)):
        if numbers.mask[b][t]:
            v, o, r = new[b][t], old[b][t], target[b][t]
            worst = (v - r) ** 2
            if clip is not None:
                worst = max(worst, (clamp(v, o - clip, o + clip) - r) ** 2)
            errors.append(0.5 * worst)
    out = value_loss(
        values=tensor(new), old_values=tensor(old), returns=tensor(target), action_mask=torch.tensor(numbers.mask),
        value_clip=clip,
    )  # fmt: skip
    assert mean(out) == pytest.approx(math.fsum(errors) / max(len(errors), 1), abs=1e-12)


@SETTINGS
@given(seed=seeds, estimator=st.sampled_from(get_args(KLEstimator)), scale=st.sampled_from([0.1, 1.0, 8.0]))
def test_kl_loss(seed: int, estimator: KLEstimator, scale: float) -> None:
    numbers = Numbers(seed)
    new, ref = numbers.rows(scale), numbers.rows(scale)
    d = [new[b][t] - ref[b][t] for b, t in product(range(4), range(6)) if numbers.mask[b][t]]
    formula = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}[estimator]
    out = kl_loss(
        logprobs=tensor(new), ref_logprobs=tensor(ref), action_mask=torch.tensor(numbers.mask), estimator=estimator
    )
    expected = math.fsum(clamp(formula(x), -10, 10) for x in d) / max(len(d), 1)
    assert mean(out) == pytest.approx(expected, abs=1e-12)


@SETTINGS
@given(seed=seeds, gamma=st.floats(0, 1), lambd=st.floats(0, 1), no_std_norm=st.booleans())
def test_gae_and_whitening(seed: int, gamma: float, lambd: float, no_std_norm: bool) -> None:
    numbers = Numbers(seed)
    rewards, values = numbers.rows(), numbers.rows()
    mask = torch.tensor(numbers.mask)
    advantages, returns = compute_advantages("gae", tensor(rewards), mask, tensor(values), gamma, lambd)
    expected: list[float] = []
    for b, on in enumerate(numbers.mask):
        r, v = masked(rewards[b], on), [*masked(values[b], on), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        # eq. 16 as the sum it abbreviates
        row = [math.fsum((gamma * lambd) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(r))]
        assert returns[b][mask[b]].tolist() == pytest.approx([a + w for a, w in zip(row, v, strict=False)], abs=1e-12)
        expected += row
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-12)
    if not expected:
        return
    spread = 1.0 if no_std_norm else math.sqrt(max(statistics.pvariance(expected), 1e-8))
    whitened = [(x - statistics.fmean(expected)) / spread for x in expected]
    assert whiten(advantages, mask, no_std_norm)[mask].tolist() == pytest.approx(whitened, abs=1e-9)


@SETTINGS
@given(
    estimator=st.sampled_from(tuple(ESTIMATORS)),
    groups=st.lists(st.lists(st.floats(-10, 10).map(lambda x: round(x, 2)), min_size=2, max_size=6), max_size=4),
    seed=seeds,
)
def test_group_baseline(estimator: str, groups: list[list[float]], seed: int) -> None:
    samples = [(number, i, reward) for number, group in enumerate(groups) for i, reward in enumerate(group)]
    random.Random(seed).shuffle(samples)
    found = group_baseline(
        estimator, torch.tensor([s[2] for s in samples], dtype=torch.float64), [s[0] for s in samples]
    )
    for (number, i, reward), value in zip(samples, found.rewards.tolist(), strict=True):
        group = groups[number]
        others = [r for j, r in enumerate(group) if j != i]
        centred = reward - statistics.fmean(group)
        expected = {
            "rloo": reward - statistics.fmean(others),
            "group_norm": centred / (statistics.stdev(group) + 1e-9),
            "dr_grpo": centred,
            "reinforce_baseline": centred,
            "maxrl": centred / statistics.fmean(group) if statistics.fmean(group) > 1e-9 else 0.0,
        }.get(estimator, reward)
        if len(set(group)) == 1 and ESTIMATORS[estimator].groups:
            assert value == 0.0
        else:
            assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
    stds = [statistics.stdev(group) for group in groups]
    assert found.group_std == pytest.approx(statistics.fmean(stds) if stds else 0.0, abs=1e-9)


@SETTINGS
@given(seed=seeds, coef=st.floats(0, 2), gamma=st.floats(0, 1))
def test_returns_of_a_reward_with_a_kl_penalty(seed: int, coef: float, gamma: float) -> None:
    numbers = Numbers(seed)
    kl, scores, mask = numbers.rows(), [0.5, -1.0, 2.0, 0.0], torch.tensor(numbers.mask)
    rewards = token_rewards(torch.tensor(scores, dtype=torch.float64), tensor(kl), coef, mask)
    returns, _ = compute_advantages("reinforce", rewards, mask, gamma=gamma)
    for b, on in enumerate(numbers.mask):
        r = [-coef * x for x in masked(kl[b], on)]
        if r:
            r[-1] += scores[b]
        expected = [math.fsum(gamma**k * x for k, x in enumerate(r[t:])) for t in range(len(r))]
        assert returns[b][mask[b]].tolist() == pytest.approx(expected, abs=1e-12)
