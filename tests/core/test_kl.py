"""KL estimators and controllers."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf.core.config import KLConfig, KLEstimator
from openrlhf.core.kl import KLController, kl_estimate
from support.core_helpers import INF, NAN, AdamState, adam_step, check, gradient

F64 = torch.float64


@pytest.mark.parametrize(
    ("estimator", "d", "expected"),
    [
        ("k1", 0.3, 0.3),
        ("k1", -0.3, -0.3),
        ("k2", 0.3, 0.045),
        ("k2", -0.3, 0.045),
        ("k3", 0.3, 0.0408182206817),
        ("k3", -0.3, 0.0498588075760),
        ("k3", -math.log(2), 2 - math.log(2) - 1),  # B008: the normal zone
        ("k1", 12.0, 10.0),
        ("k1", -12.0, -10.0),
        ("k2", 5.0, 10.0),
        ("k3", -3.0, 10.0),
        ("k3", 10.5, math.exp(-10.5) + 9.5),
        ("k3", 30.0, 10.0),
        ("k1", 0.0, 0.0),
        ("k2", 0.0, 0.0),
        ("k3", 0.0, 0.0),
    ],
)
def test_values(estimator: KLEstimator, d: float, expected: float) -> None:
    value = kl_estimate(torch.tensor([d], dtype=F64), torch.zeros(1, dtype=F64), estimator)
    assert float(value) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "d", "expected"),
    [
        ("k1", 0.3, 1.0),
        ("k2", 0.3, 0.3),
        ("k2", -2.0, -2.0),
        ("k3", 0.3, 1 - math.exp(-0.3)),
        ("k3", -2.0, 1 - math.exp(2.0)),
        ("k1", 11.0, 0.0),
        ("k2", 6.0, 0.0),
        ("k3", -4.0, 0.0),
        ("k3", 25.0, 0.0),
    ],
)
def test_gradients(estimator: KLEstimator, d: float, expected: float) -> None:
    logp = torch.tensor([d], dtype=F64, requires_grad=True)
    grad = gradient(kl_estimate(logp, torch.zeros(1, dtype=F64), estimator).sum(), logp)
    assert float(grad) == pytest.approx(expected, abs=1e-12)


# B008: exp overflows before the clamp.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
@pytest.mark.parametrize("d", [-100.0, 100.0, -1e4, 1e4, -INF, INF])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_extreme_log_ratios_are_finite(estimator: KLEstimator, d: float, dtype: torch.dtype) -> None:
    logp = torch.tensor([d], dtype=dtype, requires_grad=True)
    value = kl_estimate(logp, torch.zeros(1, dtype=dtype), estimator)
    assert abs(float(value.detach())) == 10.0
    assert float(gradient(value.sum(), logp)) == 0.0


def test_b008_weights_stay_finite_after_a_step() -> None:
    logp = torch.tensor([-100.0, 0.5], requires_grad=True)
    stepped = adam_step(logp, gradient(kl_estimate(logp, torch.zeros(2), "k3").sum(), logp), AdamState(lr=0.1))
    assert stepped.isfinite().all()
    assert float(stepped.detach()[0]) == -100.0


def test_k3_is_never_negative() -> None:
    d = torch.cat([torch.linspace(-1e-3, 1e-3, 2001), torch.logspace(-30, 4, 500)])
    assert (kl_estimate(torch.cat([d, -d]), torch.zeros(2 * len(d)), "k3") >= 0).all()


def test_half_precision_is_computed_in_float32() -> None:
    assert kl_estimate(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1), "k1").dtype == torch.float32
    assert kl_estimate(torch.zeros(1, dtype=F64), torch.zeros(1), "k1").dtype == F64


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"`kl\.estimator` 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="differ"):
        kl_estimate(torch.zeros(2), torch.zeros(1), "k1")


def test_fixed_controller_never_moves() -> None:
    controller = KLController(KLConfig(init_coef=0.05))
    controller.update(100.0, 10_000)
    assert controller.value == 0.05


@pytest.mark.parametrize(
    ("kl", "n", "expected"),
    [
        (6.6, 1000, 0.1 * (1 + 0.1 * 0.1)),  # error +0.1
        (5.4, 1000, 0.1 * (1 - 0.1 * 0.1)),
        (60.0, 1000, 0.1 * (1 + 0.2 * 0.1)),  # clipped to +0.2
        (0.0, 1000, 0.1 * (1 - 0.2 * 0.1)),
        (6.0, 1000, 0.1),
        (NAN, 1000, 0.1),
        (INF, 1000, 0.1),
        (0.0, 10**6, 0.1 * 0.1),  # would be negative
    ],
)
def test_adaptive_controller(kl: float, n: int, expected: float) -> None:
    controller = KLController(KLConfig(init_coef=0.1, target=6.0, horizon=10_000))
    controller.update(kl, n)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_adaptive_controller_reaches_its_target() -> None:
    controller = KLController(KLConfig(init_coef=0.01, target=0.05, horizon=1000))
    for _ in range(400):  # a policy whose KL is inversely proportional to the coefficient
        controller.update(0.01 / controller.value, 100)
    assert 0.01 / controller.value == pytest.approx(0.05, rel=1e-3)


def test_controller_state_round_trip() -> None:
    first = KLController(KLConfig(init_coef=0.1, target=1.0, horizon=100))
    first.update(5.0, 50)
    second = KLController(KLConfig(init_coef=0.1, target=1.0, horizon=100))
    second.load_state_dict(first.state_dict())
    first.update(3.0, 50)
    second.update(3.0, 50)
    assert first.value == second.value


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KLConfig(init_coef=-0.1), r"`kl\.init_coef`"),
        (KLConfig(target=-1.0), r"`kl\.target`"),
        (KLConfig(target=0.0), r"`kl\.target`"),
        (KLConfig(target=1.0, horizon=0), r"`kl\.horizon`"),
    ],
)
def test_controller_errors(config: KLConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLController(config)


def test_k2_of_two_equal_log_probs_has_zero_gradient() -> None:
    logp = torch.full((3,), -2.0, requires_grad=True)
    check(gradient(kl_estimate(logp, logp.detach(), "k2").sum(), logp), [0, 0, 0])
