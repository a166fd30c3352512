"""Off-policy correction, through the policy loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from openrlhf.core.config import AdvantageConfig, CorrectionType, PolicyLossConfig
from openrlhf.core.losses.policy import policy_loss
from support.core_helpers import INF, NAN, check, gradient, mask, mean, metric_means, random_inputs

PPO = PolicyLossConfig()
GSPO = PolicyLossConfig(policy_loss_type="gspo")
CORRECTED = AdvantageConfig(is_correction_enable=True)
F64 = torch.float64

# Weights of old against rollout: w = 1.2, 0.1, 9; sequence geometric mean (1.2 * .1 * 9)^(1/3) = 1.026.
W = [1.2, 0.1, 9.0]


@pytest.mark.parametrize(
    ("kind", "threshold", "weights", "rejected"),
    [
        ("tis", (0.5, 5.0), [1.2, 0.5, 5.0], 0),
        ("icepop", (0.5, 5.0), [1.2, 0, 0], 2 / 3),
        ("seq-mask-tis", (0.5, 5.0), [1.2, 0.5, 5.0], 0),
        ("seq-mask-tis", (1.1, 5.0), [0, 0, 0], 1),
        ("seq-mask-tis", (0.5, 1.02), [0, 0, 0], 1),
        ("icepop", (1.2, 1.2), [1.2, 0, 0], 2 / 3),
    ],
)
def test_correction(
    kind: CorrectionType, threshold: tuple[float, float], weights: list[float], rejected: float
) -> None:
    logp = torch.zeros(1, 3, dtype=F64, requires_grad=True)
    rollout = -torch.tensor([W], dtype=F64).log()
    out = policy_loss(
        logprobs=logp, old_logprobs=torch.zeros(1, 3), rollout_logprobs=rollout, advantages=torch.ones(1, 3),
        action_mask=mask([1, 1, 1]), config=PPO, correction=replace(
            CORRECTED, is_correction_type=kind, is_correction_threshold=threshold
        ),
    )  # fmt: skip
    check(gradient(out.total, logp), [[-w for w in weights]])
    assert out.count == 3  # rejected tokens stay in the denominator
    assert metric_means(out)["is_filter_ratio"] == pytest.approx(rejected)
    assert metric_means(out)["vllm_kl"] == pytest.approx(-sum(math.log(w) for w in W) / 3)
    assert metric_means(out)["logprobs_diff"] == pytest.approx(sum(abs(math.log(w)) for w in W) / 3)


@pytest.mark.parametrize(
    ("kind", "threshold", "weight"),
    [
        ("tis", (0.5, 5.0), 1.08 ** (1 / 3)),
        ("tis", (0.5, 1.0), 1.0),
        ("icepop", (0.5, 5.0), 1.08 ** (1 / 3)),
        ("icepop", (0.5, 1.0), 0.0),
        ("seq-mask-tis", (0.5, 1.0), 0.0),
        ("seq-mask-tis", (0.5, 5.0), 1.08 ** (1 / 3)),
    ],
)
def test_correction_of_gspo_acts_on_sequences(
    kind: CorrectionType, threshold: tuple[float, float], weight: float
) -> None:
    logp = torch.zeros(1, 3, dtype=F64)
    correction = replace(CORRECTED, is_correction_type=kind, is_correction_threshold=threshold)
    out = policy_loss(
        logprobs=logp, old_logprobs=logp, rollout_logprobs=-torch.tensor([W], dtype=F64).log(),
        advantages=torch.ones(1, 3), action_mask=mask([1, 1, 1]), config=GSPO, correction=correction,
    )  # fmt: skip
    assert mean(out) == pytest.approx(-weight)
    assert metric_means(out)["is_filter_ratio"] == (1.0 if weight == 0 else 0.0)


@pytest.mark.parametrize("difference", [1e4, -1e4, INF, -INF, NAN])
def test_icepop_rejects_extremes_with_a_select(difference: float) -> None:
    logp = torch.tensor([[0.0, NAN]], requires_grad=True)
    out = policy_loss(
        logprobs=logp, old_logprobs=torch.zeros(1, 2), rollout_logprobs=torch.tensor([[0.0, difference]]),
        advantages=torch.ones(1, 2), action_mask=mask([1, 1]), config=PPO,
        correction=replace(CORRECTED, is_correction_type="icepop"),
    )  # fmt: skip
    check(gradient(out.total, logp), [[-1, 0]])
    assert mean(out) == -0.5


def test_correction_of_an_unchanged_policy_changes_nothing() -> None:  # B026
    inputs = random_inputs(2)
    inputs["rollout_logprobs"] = inputs["old_logprobs"]
    plain = policy_loss(**inputs, config=PPO)
    for kind in ("tis", "icepop", "seq-mask-tis"):
        fixed = policy_loss(**inputs, config=PPO, correction=replace(CORRECTED, is_correction_type=kind))
        check(fixed.total, plain.total)
        assert metric_means(fixed)["vllm_kl"] == 0
