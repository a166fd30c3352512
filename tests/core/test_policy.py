"""Policy, KL and entropy losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openrlhf.core.config import AdvantageConfig, PolicyLossConfig
from openrlhf.core.losses.aggregate import loss_count
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.policy import entropy_loss, kl_loss, policy_loss
from openrlhf.core.tables import LossAggMode
from support.core_helpers import INF, NAN, check, gradient, mask, mean, metric_means, random_inputs, rows, step_mean

PPO = PolicyLossConfig()
GSPO = PolicyLossConfig(policy_loss_type="gspo")
CORRECTED = AdvantageConfig(is_correction_enable=True)
F64 = torch.float64


def one_token(ratio: float, advantage: float, config: PolicyLossConfig) -> tuple[LossOutput, float]:
    """The loss of one token and its gradient with respect to the ratio."""
    logp = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    out = policy_loss(
        logprobs=logp,
        old_logprobs=torch.zeros(1, 1, dtype=F64),
        advantages=torch.tensor([[advantage]], dtype=F64),
        action_mask=mask([1]),
        config=config,
    )
    return out, float(gradient(out.total, logp)) / ratio


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "slope", "clipped"),
    [
        (1, 1.5, 1.2, 0, 1),
        (-1, 0.5, -0.8, 0, 1),
        (-1, 1.5, -1.5, -1, 0),
        (1, 0.5, 0.5, 1, 0),
        (1, 1.0, 1.0, 1, 0),
        (-2, 1.0, -2.0, -2, 0),
        (0, 5.0, 0.0, 0, 0),
    ],
)
def test_clip(advantage: float, ratio: float, objective: float, slope: float, clipped: float, loss_type: str) -> None:
    out, grad = one_token(ratio, advantage, PolicyLossConfig(policy_loss_type=loss_type))
    assert mean(out) == pytest.approx(-objective, abs=1e-12)
    assert grad == pytest.approx(-slope, abs=1e-12)
    assert metric_means(out)["ppo_clip_ratio"] == clipped
    assert metric_means(out)["policy_loss"] == pytest.approx(-objective, abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "slope"),
    [(-1, 5.0, -3.0, 0), (-1, 2.5, -2.5, -1), (-1, 0.5, -0.8, 0), (1, 5.0, 1.2, 0), (1, 0.5, 0.5, 1)],
)
def test_dual_clip(advantage: float, ratio: float, objective: float, slope: float) -> None:
    out, grad = one_token(ratio, advantage, PolicyLossConfig(dual_clip=3.0))
    assert mean(out) == pytest.approx(-objective, abs=1e-12)
    assert grad == pytest.approx(-slope, abs=1e-12)


def test_asymmetric_clip_overrides_the_symmetric_one() -> None:
    symmetric = PolicyLossConfig(eps_clip=0.1)
    assert mean(one_token(1.5, 1, symmetric)[0]) == pytest.approx(-1.1)
    assert mean(one_token(0.5, -1, symmetric)[0]) == pytest.approx(0.9)
    config = PolicyLossConfig(eps_clip=0.01, eps_clip_low_high=(0.2, 0.28))
    assert mean(one_token(1.5, 1, config)[0]) == pytest.approx(-1.28)
    assert mean(one_token(0.5, -1, config)[0]) == pytest.approx(0.8)


def two_samples(mode: LossAggMode, loss_type: str = "ppo", micro: int = 2, width: int = 6) -> LossOutput:
    """Ratio 1; lengths 1 and 3 with advantages +1 and -1, and two observation tokens in the second (B001, B002)."""
    m = torch.zeros(2, width, dtype=torch.bool)
    m[0, 1] = True
    m[1, [1, 2, 5]] = True
    adv = torch.tensor([[1.0], [-1.0]]).expand(2, width)
    config = PolicyLossConfig(loss_agg_mode=mode, policy_loss_type=loss_type)
    parts = []
    for rows_ in torch.arange(2).split(micro):
        logp = torch.zeros(len(rows_), width, requires_grad=True)
        parts.append(
            policy_loss(
                logprobs=logp,
                old_logprobs=logp.detach(),
                advantages=adv[rows_],
                action_mask=m[rows_],
                config=config,
                agg_constant=8.0,
            )
        )
    return LossOutput(total=torch.stack([p.total for p in parts]).sum(), count=sum(p.count for p in parts))


# B001, B002: one mean over the step, whatever the micro-batch size and the padding.
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("width", [6, 11])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 0.5), ("seq-mean-token-mean", 0.0), ("seq-mean-token-sum-norm", (-1 / 8 + 3 / 8) / 2)],
)
def test_aggregation(mode: LossAggMode, expected: float, micro: int, width: int) -> None:
    assert mean(two_samples(mode, micro=micro, width=width)) == pytest.approx(expected, abs=1e-7)


def test_gspo_implies_sequence_means() -> None:
    assert mean(two_samples("token-mean", "gspo")) == pytest.approx(0.0, abs=1e-7)
    with pytest.raises(ValueError, match=r"`loss_agg_mode` 'seq-mean-token-sum-norm'"):
        two_samples("seq-mean-token-sum-norm", "gspo")


def test_gspo_ratio_is_the_geometric_mean() -> None:
    logp = rows([0.3, -0.1, 5.0], [0.0, 0.0, 0.0]).requires_grad_()
    m = mask([1, 1, 0], [0, 0, 0])
    out = policy_loss(
        logprobs=logp,
        old_logprobs=torch.zeros_like(logp),
        advantages=rows([2, 2, 2], [1, 1, 1]),
        action_mask=m,
        config=GSPO,
    )
    assert out.count == 1
    assert mean(out) == pytest.approx(-2 * math.exp(0.1))
    check(gradient(out.total, logp), [[-math.exp(0.1)] * 2 + [0], [0, 0, 0]])


VARIANTS = [
    (PPO, None),
    (replace(PPO, dual_clip=1.5, loss_agg_mode="seq-mean-token-mean"), CORRECTED),
    (replace(PPO, loss_agg_mode="seq-mean-token-sum-norm"), replace(CORRECTED, is_correction_type="icepop")),
    (PPO, AdvantageConfig(is_correction_enable=True, is_correction_type="seq-mask-tis")),
    (GSPO, None),
    (GSPO, AdvantageConfig(is_correction_enable=True, is_correction_type="icepop")),
]


@pytest.mark.parametrize(("config", "correction"), VARIANTS)
def test_gradient_does_not_depend_on_the_split(config: PolicyLossConfig, correction: AdvantageConfig | None) -> None:
    inputs = random_inputs(0)

    def grad(micro: int, pad_left: int = 0, pad_right: int = 0) -> Tensor:
        padded = {k: torch.nn.functional.pad(v, (pad_left, pad_right)) for k, v in inputs.items()}
        logp = padded.pop("logprobs").requires_grad_()
        outs = []
        for i in torch.arange(len(logp)).split(micro):
            part = {k: v[i] for k, v in padded.items()}
            outs.append(policy_loss(logprobs=logp[i], **part, config=config, correction=correction, agg_constant=9.0))
        return gradient(step_mean(outs), logp)[:, pad_left : pad_left + 7]

    whole = grad(6)
    assert whole.abs().sum() > 0
    for micro, left, right in [(1, 0, 0), (2, 0, 5), (4, 3, 0), (6, 40, 40)]:
        check(grad(micro, left, right), whole, 1e-7)


def test_permuting_the_samples_permutes_the_gradient() -> None:
    inputs, order = random_inputs(1), torch.tensor([3, 1, 0, 5, 4, 2])

    def grad(i: Tensor) -> Tensor:
        part = {k: v[i] for k, v in inputs.items()}
        logp = part.pop("logprobs").requires_grad_()
        return gradient(step_mean([policy_loss(logprobs=logp, **part, config=PPO, correction=CORRECTED)]), logp)

    check(grad(order), grad(torch.arange(6))[order], 1e-7)


# B005
@pytest.mark.parametrize(("config", "correction"), VARIANTS)
def test_no_trainable_token_contributes_nothing(config: PolicyLossConfig, correction: AdvantageConfig | None) -> None:
    for b in (0, 2):
        logp = torch.full((b, 3), NAN, requires_grad=True)
        out = policy_loss(
            logprobs=logp,
            old_logprobs=logp.detach(),
            rollout_logprobs=logp.detach(),
            advantages=logp.detach(),
            action_mask=torch.zeros(b, 3, dtype=torch.bool),
            config=config,
            correction=correction,
        )
        assert float(out.total.detach()) == 0.0
        assert out.count == 0
        assert (gradient(out.total, logp) == 0).all()
        assert all(float(total) == 0 and count == 0 for total, count in out.metrics.values())


def test_empty_micro_batch_does_not_change_the_mean() -> None:  # B005
    logp = torch.zeros(2, 3, requires_grad=True)
    m = mask([0, 1, 1], [0, 0, 0])
    outs = [
        policy_loss(
            logprobs=logp[i], old_logprobs=torch.zeros(1, 3), advantages=-0.6 * torch.ones(1, 3), action_mask=m[i],
            config=PPO,
        )
        for i in (slice(0, 1), slice(1, 2))
    ]  # fmt: skip
    assert float(step_mean(outs).detach()) == pytest.approx(0.6)


# B010: the metric comes from the raw log-ratio, the loss from the clamped one.
def test_ppo_kl_is_raw() -> None:
    out = policy_loss(
        logprobs=rows([30.0]), old_logprobs=rows([0.0]), advantages=rows([-1.0]), action_mask=mask([1]), config=PPO
    )
    assert metric_means(out)["ppo_kl"] == -30
    assert mean(out) == pytest.approx(math.exp(20))


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4, -INF])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_log_ratios(log_ratio: float, advantage: float, dtype: torch.dtype, loss_type: str) -> None:
    logp = torch.tensor([[log_ratio]], dtype=dtype, requires_grad=True)
    out = policy_loss(
        logprobs=logp,
        old_logprobs=torch.zeros(1, 1),
        advantages=torch.tensor([[advantage]]),
        action_mask=mask([1]),
        config=PolicyLossConfig(policy_loss_type=loss_type),
    )
    assert out.total.isfinite()
    assert float(gradient(out.total, logp)) == 0.0


def test_nan_under_the_mask_reaches_nothing() -> None:
    logp = rows([0.1, NAN, INF]).requires_grad_()
    junk = rows([0.0, NAN, -INF])
    out = policy_loss(
        logprobs=logp, old_logprobs=junk, rollout_logprobs=junk, advantages=rows([1.0, NAN, INF]),
        action_mask=mask([1, 0, 0]), config=PPO, correction=CORRECTED,
    )  # fmt: skip
    check(gradient(out.total, logp), [[-math.exp(0.1), 0, 0]])
    assert all(math.isfinite(v) for v in metric_means(out).values())


def test_nan_on_a_trainable_token_is_not_hidden() -> None:
    out = policy_loss(
        logprobs=rows([NAN]), old_logprobs=rows([0.0]), advantages=rows([1.0]), action_mask=mask([1]), config=PPO
    )
    assert math.isnan(mean(out))


def test_first_step_ratio_is_one_and_detached_logprobs_equal_the_long_way() -> None:
    inputs = random_inputs(3)
    logp = inputs.pop("logprobs").requires_grad_()
    inputs["old_logprobs"] = logp.detach().clone()
    long = policy_loss(logprobs=logp, **inputs, config=PPO)
    inputs["old_logprobs"] = logp
    short = policy_loss(logprobs=logp, **inputs, config=PPO)
    check(gradient(short.total, logp), gradient(long.total, logp), 0)
    assert metric_means(long)["ppo_clip_ratio"] == 0
    assert metric_means(long)["ppo_kl"] == 0


@pytest.mark.parametrize(
    ("config", "correction", "message"),
    [
        (PolicyLossConfig(dual_clip=1.0), None, r"`dual_clip` must be > 1, got 1\.0"),
        (PolicyLossConfig(eps_clip=-0.1), None, r"`eps_clip`"),
        (PolicyLossConfig(eps_clip_low_high=(1.5, 0.2)), None, r"`eps_clip`"),
        (PPO, replace(CORRECTED, is_correction_threshold=(5.0, 0.5)), "_threshold` needs 0 <= low <= high"),
        (PPO, replace(CORRECTED, is_correction_type="clip"), "is_correction_type` 'clip' is unknown"),
    ],
)
def test_options_out_of_range(config: PolicyLossConfig, correction: AdvantageConfig | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(**random_inputs(0), config=config, correction=correction)


def test_inputs_that_do_not_fit() -> None:
    inputs = random_inputs(0)
    with pytest.raises(ValueError, match="needs the log-probs of the rollout engine"):
        policy_loss(**{**inputs, "rollout_logprobs": None}, config=PPO, correction=CORRECTED)
    with pytest.raises(ValueError, match=r"advantages must be \[B, T\]"):
        policy_loss(**{**inputs, "advantages": torch.zeros(6, 1)}, config=PPO)
    with pytest.raises(ValueError, match="action_mask must be a bool"):
        policy_loss(**{**inputs, "action_mask": inputs["action_mask"].float()}, config=PPO)
    with pytest.raises(ValueError, match="agg_constant must be a length > 0"):
        policy_loss(**inputs, config=PolicyLossConfig(loss_agg_mode="seq-mean-token-sum-norm"), agg_constant=0)


@pytest.mark.parametrize(
    ("mode", "expected"), [("token-mean", 3), ("seq-mean-token-mean", 2), ("seq-mean-token-sum-norm", 2)]
)
def test_loss_count(mode: LossAggMode, expected: int) -> None:
    assert loss_count(mask([0, 1, 1], [0, 0, 0], [0, 0, 1]), mode) == expected


def test_kl_loss() -> None:
    logp = rows([0.3, -0.3, NAN]).requires_grad_()
    out = kl_loss(logprobs=logp, ref_logprobs=rows([0, 0, NAN]), action_mask=mask([1, 1, 0]), estimator="k2")
    assert mean(out) == pytest.approx(0.045)
    assert metric_means(out)["kl"] == pytest.approx(0.045)
    check(gradient(out.total, logp), [[0.3, -0.3, 0]])


def test_entropy_loss() -> None:
    entropy = rows([0.5, NAN, 1.0]).requires_grad_()
    out = entropy_loss(entropy=entropy, action_mask=mask([1, 0, 1]))
    assert mean(out) == pytest.approx(0.75)
    assert metric_means(out)["entropy_loss"] == pytest.approx(0.75)
    check(gradient(out.total, entropy), [[1, 0, 1]])
