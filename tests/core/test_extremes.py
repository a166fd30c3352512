"""What no loss may do with bad numbers: hide them on a trainable token, or let them in from under the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from openrlhf.core.advantages import compute_advantages, whiten
from openrlhf.core.config import PolicyLossConfig
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.policy import entropy_loss, kl_loss, policy_loss
from openrlhf.core.losses.supervised import (
    chosen_nll_loss,
    sft_loss,
)
from openrlhf.core.losses.value import value_loss
from support.core_helpers import INF, NAN, check, gradient, mask, mean, rows

Loss = Callable[[Tensor, Tensor], LossOutput]


def policy(kind: str, x: Tensor, m: Tensor) -> LossOutput:
    old = torch.full_like(x, -1.0).detach()
    config = PolicyLossConfig(policy_loss_type="gspo" if kind == "gspo" else "ppo")
    return policy_loss(logprobs=x, old_logprobs=old, advantages=torch.ones_like(old), action_mask=m, config=config)


def kl(estimator: str, x: Tensor, m: Tensor) -> LossOutput:
    ref = torch.full_like(x, -1.0).detach()
    return kl_loss(logprobs=x, ref_logprobs=ref, action_mask=m, estimator=estimator)  # pyright: ignore[reportArgumentType]


def value(clip: float | None, x: Tensor, m: Tensor) -> LossOutput:
    old = torch.zeros_like(x).detach()
    return value_loss(values=x, old_values=old, returns=old, action_mask=m, value_clip=clip)


LOSSES: dict[str, Loss] = {
    "ppo": partial(policy, "ppo"),
    "gspo": partial(policy, "gspo"),
    "k1": partial(kl, "k1"),
    "k2": partial(kl, "k2"),
    "k3": partial(kl, "k3"),
    "value": partial(value, 0.5),
    "value without clip": partial(value, None),
    "entropy": lambda x, m: entropy_loss(entropy=x, action_mask=m),
    "sft": lambda x, m: sft_loss(logprobs=x, loss_mask=m),
    "nll of the chosen": lambda x, m: chosen_nll_loss(logprobs=x, loss_mask=m),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@every_loss
def test_nan_on_a_trainable_token_stays_visible(loss: Loss) -> None:
    assert math.isnan(mean(loss(rows([-1.0, NAN]), mask([1, 1]))))


@every_loss
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_nothing_comes_from_under_the_mask(loss: Loss, junk: float) -> None:
    x = rows([-1.5, junk, -0.5]).requires_grad_()
    clean = rows([-1.5, -0.5]).requires_grad_()
    out, want = loss(x, mask([1, 0, 1])), loss(clean, mask([1, 1]))
    assert out.count == want.count
    check(out.total, want.total, 1e-12)
    check(gradient(out.total, x)[:, [0, 2]], gradient(want.total, clean), 1e-12)
    assert float(gradient(loss(x, mask([1, 0, 1])).total, x)[0, 1]) == 0.0


@every_loss
def test_all_masked_is_a_zero_with_a_gradient(loss: Loss) -> None:
    x = rows([NAN, INF]).requires_grad_()
    out = loss(x, mask([0, 0]))
    assert (float(out.total.detach()), out.count) == (0.0, 0.0)
    assert gradient(out.total, x).tolist() == [[0.0, 0.0]]
    assert all(float(total) == 0.0 and count == 0.0 for total, count in out.metrics.values())


@every_loss
@pytest.mark.parametrize("extreme", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_numbers_stay_finite(loss: Loss, extreme: float, dtype: torch.dtype) -> None:
    x = rows([extreme, -1.0], dtype=dtype).requires_grad_()
    out = loss(x, mask([1, 1]))
    assert math.isfinite(mean(out))
    assert gradient(out.total, x).isfinite().all()


def test_one_bad_reward_or_value_reaches_its_own_sample_only() -> None:
    m = mask([1, 1], [1, 1])
    values = rows([0.0, NAN], [0.5, 0.5])
    advantages, _ = compute_advantages("gae", rows([0, 1], [0, 1]), m, values)
    assert advantages[0].isnan().any()
    check(advantages[1], [0.5, 0.5])
    advantages, _ = compute_advantages("reinforce", rows([0, INF], [0, 1]), m)
    check(advantages[1], [1, 1])


def test_whitening_does_not_hide_a_nan() -> None:
    """All tokens become NaN: the step is skipped on every rank and the sample is named."""
    assert whiten(rows([1.0, NAN, 2.0]), mask([1, 1, 1])).isnan().all()
