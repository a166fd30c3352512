"""The critic's loss."""

from __future__ import annotations

import pytest
import torch

from openrlhf.core.losses.value import value_loss
from support.core_helpers import INF, NAN, check, gradient, mask, mean, metric_means, rows


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "bound"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, 0),
        (2.0, 1.0, 3.0, 0.5 * 1.5**2, 0.0, 1),  # clipped to 1.5: the worse error counts, without gradient
        (1.2, 1.0, 3.0, 0.5 * 1.8**2, -1.8, 0),
        (0.0, 1.0, 3.0, 4.5, -3.0, 0),  # moving away is not clipped
    ],
)
def test_one_token(value: float, old: float, target: float, loss: float, slope: float, bound: float) -> None:
    v = rows([value]).requires_grad_()
    out = value_loss(values=v, old_values=rows([old]), returns=rows([target]), action_mask=mask([1]), value_clip=0.5)
    assert mean(out) == pytest.approx(loss)
    assert float(gradient(out.total, v)) == pytest.approx(slope)
    assert metric_means(out) == pytest.approx(
        {"critic_loss": loss, "values": value, "returns": target, "value_clip_ratio": bound}
    )


def test_without_clipping() -> None:
    out = value_loss(
        values=rows([2.0]), old_values=rows([1.0]), returns=rows([3.0]), action_mask=mask([1]), value_clip=None
    )
    assert mean(out) == pytest.approx(0.5)


def test_mean_over_tokens_ignores_what_is_masked() -> None:
    v = rows([1, NAN, 2], [INF, NAN, NAN]).requires_grad_()
    out = value_loss(
        values=v, old_values=v, returns=rows([0, NAN, 0], [1, 1, 1]), action_mask=mask([1, 0, 1], [0, 0, 0]),
        value_clip=0.5,
    )  # fmt: skip
    assert mean(out) == pytest.approx((0.5 + 2) / 2)
    check(gradient(out.total, v), [[1, 0, 2], [0, 0, 0]])


def test_all_masked() -> None:
    v = torch.full((2, 3), NAN, requires_grad=True)
    out = value_loss(values=v, old_values=v, returns=v, action_mask=torch.zeros(2, 3, dtype=torch.bool), value_clip=0.5)
    assert (mean(out), out.count) == (0, 0)
    assert (gradient(out.total, v) == 0).all()


def test_errors() -> None:
    x, m = rows([1.0]), mask([1])
    with pytest.raises(ValueError, match=r"`value_clip` must be > 0, got 0\.0"):
        value_loss(values=x, old_values=x, returns=x, action_mask=m, value_clip=0.0)
    with pytest.raises(ValueError, match=r"returns must be \[B, T\]"):
        value_loss(values=x, old_values=x, returns=x[0], action_mask=m, value_clip=0.5)
