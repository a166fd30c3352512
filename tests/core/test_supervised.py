"""DPO, cDPO, IPO, the likelihood of the chosen answer, and the reward model's losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from openrlhf.core.losses.supervised import (
    PairLogprobs,
    chosen_nll_loss,
    dpo_loss,
    reward_model_loss,
    sequence_logprobs,
    sft_loss,
)
from support.core_helpers import INF, NAN, check, gradient, mask, mean, metric_means, rows


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sequence_logprobs_are_sums_over_the_answer() -> None:
    x = rows([-1, -2, NAN], [NAN, -4, -5]).requires_grad_()
    out = sequence_logprobs(x, mask([1, 1, 0], [0, 1, 1]))
    check(out, [-3, -9])
    check(gradient(out.sum(), x), [[1, 1, 0], [0, 1, 1]])


# z = (-10 + 11) - (-13 + 12) = 2
PAIR = {"chosen": -10.0, "rejected": -13.0, "ref_chosen": -11.0, "ref_rejected": -12.0}


@pytest.mark.parametrize(
    ("label_smoothing", "ipo", "loss", "slope"),
    [
        (0.0, False, softplus(-0.2), -0.1 * sigmoid(-0.2)),
        (0.1, False, 0.9 * softplus(-0.2) + 0.1 * softplus(0.2), 0.1 * (sigmoid(0.2) - 0.9)),
        (0.0, True, (2 - 5) ** 2, 2 * (2 - 5)),
    ],
)
def test_dpo(label_smoothing: float, ipo: bool, loss: float, slope: float) -> None:
    pair = {k: vec(v) for k, v in PAIR.items()}
    out = dpo_loss(PairLogprobs(**pair), beta=0.1, label_smoothing=label_smoothing, ipo=ipo)
    assert mean(out) == pytest.approx(loss)
    assert float(gradient_keep(out.total, pair["chosen"])) == pytest.approx(slope)
    assert float(gradient_keep(out.total, pair["rejected"])) == pytest.approx(-slope)
    assert metric_means(out) == pytest.approx({"loss": loss, "acc": 1, "chosen_reward": 0.1, "reject_reward": -0.1})
    (grad,) = torch.autograd.grad(out.total, pair["ref_chosen"], allow_unused=True)
    assert grad is None


def gradient_keep(total: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(total, x, retain_graph=True)[0]


def test_dpo_of_an_unmoved_policy_is_log_two() -> None:
    x, y = vec(-3, -5), vec(-2, -9)
    out = dpo_loss(PairLogprobs(chosen=x, rejected=y, ref_chosen=x, ref_rejected=y), beta=0.3)
    assert mean(out) == pytest.approx(math.log(2))
    assert metric_means(out)["acc"] == 0


@pytest.mark.parametrize("z", [1e4, -1e4])
def test_dpo_extremes_are_finite(z: float) -> None:
    chosen = vec(z)
    out = dpo_loss(PairLogprobs(chosen=chosen, rejected=vec(0), ref_chosen=vec(0), ref_rejected=vec(0)), beta=1.0)
    assert mean(out) == pytest.approx(0 if z > 0 else 1e4)
    assert float(gradient(out.total, chosen)) == pytest.approx(0 if z > 0 else -1)


def test_padding_pairs_are_left_out() -> None:
    pair = PairLogprobs(chosen=vec(1, 0), rejected=vec(0, 0), ref_chosen=vec(0, 0), ref_rejected=vec(0, 0))
    out = dpo_loss(pair, beta=1.0, valid=torch.tensor([True, False]))
    assert out.count == 1
    assert mean(out) == pytest.approx(softplus(-1))
    check(gradient(out.total, pair.chosen), [-sigmoid(-1), 0])
    none = dpo_loss(pair, beta=1.0, valid=torch.tensor([False, False]))
    assert (mean(none), none.count) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"`beta` must be > 0"),
        ({"beta": 0.1, "label_smoothing": 0.6}, r"`label_smoothing` must lie in \[0, 0\.5\], got 0\.6"),
        ({"beta": 0.1, "label_smoothing": 0.1, "ipo": True}, r"`ipo`"),
    ],
)
def test_dpo_errors(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(PairLogprobs(**{k: vec(v) for k, v in PAIR.items()}), **options)  # pyright: ignore[reportArgumentType]


def test_pair_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="vectors of one length"):
        PairLogprobs(chosen=vec(1), rejected=vec(1, 2), ref_chosen=vec(1), ref_rejected=vec(1))


def test_chosen_nll_is_a_mean_per_answer() -> None:
    x = rows([-1, -2, NAN], [NAN, NAN, -5], [NAN, NAN, NAN]).requires_grad_()
    out = chosen_nll_loss(logprobs=x, loss_mask=mask([1, 1, 0], [0, 0, 1], [0, 0, 0]))
    assert out.count == 2
    assert mean(out) == pytest.approx((1.5 + 5) / 2)
    check(gradient(out.total, x), [[-0.5, -0.5, 0], [0, 0, -1], [0, 0, 0]])


def test_sft_is_a_mean_per_token() -> None:
    x = rows([-1, -2, NAN], [INF, NAN, -6]).requires_grad_()
    out = sft_loss(logprobs=x, loss_mask=mask([1, 1, 0], [0, 0, 1]))
    assert out.count == 3
    assert mean(out) == pytest.approx(3)
    assert metric_means(out) == {"gpt_loss": pytest.approx(3)}
    check(gradient(out.total, x), [[-1, -1, 0], [0, 0, -1]])
    assert mean(sft_loss(logprobs=x, loss_mask=torch.zeros(2, 3, dtype=torch.bool))) == 0


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "loss"),
    [(2.0, 1.0, None, softplus(-1)), (2.0, 1.0, 0.5, softplus(-0.5)), (1.0, 1.0, None, math.log(2))],
)
def test_reward_model_sigmoid(chosen: float, rejected: float, margin: float | None, loss: float) -> None:
    c, r = vec(chosen), vec(rejected)
    out = reward_model_loss(chosen=c, rejected=r, margin=None if margin is None else vec(margin).detach())
    assert mean(out) == pytest.approx(loss)
    assert float(gradient(out.total, c)) == pytest.approx(-sigmoid(-(chosen - rejected - (margin or 0))))
    assert metric_means(out) == pytest.approx(
        {"loss": loss, "acc": float(chosen > rejected), "chosen_reward": chosen, "reject_reward": rejected}
    )


@pytest.mark.parametrize("difference", [0.3, -0.3, 1e4, -1e4])
def test_reward_model_logexp_does_not_overflow(difference: float) -> None:
    c = vec(difference)
    out = reward_model_loss(chosen=c, rejected=vec(0), loss_type="logexp")
    expected = softplus(-difference) if abs(difference) < 1 else max(-difference, 0)
    assert mean(out) == pytest.approx(expected)
    assert gradient(out.total, c).isfinite().all()


def test_reward_model_padding_and_errors() -> None:
    out = reward_model_loss(chosen=vec(1, 5), rejected=vec(0, 9), valid=torch.tensor([True, False]))
    assert out.count == 1
    assert mean(out) == pytest.approx(softplus(-1))
    with pytest.raises(ValueError, match=r"`loss_type` 'hinge'"):
        reward_model_loss(chosen=vec(1), rejected=vec(0), loss_type="hinge")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`margin` needs"):
        reward_model_loss(chosen=vec(1), rejected=vec(0), margin=vec(1), loss_type="logexp")
