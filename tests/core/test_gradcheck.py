"""Analytic gradients against finite differences, float64, at points away from kinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from openrlhf.core.config import AdvantageConfig, KLEstimator, PolicyLossConfig
from openrlhf.core.kl import kl_estimate
from openrlhf.core.logprobs import entropy_from_logits, logprobs_from_logits, token_logprobs
from openrlhf.core.losses.policy import entropy_loss, kl_loss, policy_loss
from openrlhf.core.losses.supervised import (
    PairLogprobs,
    chosen_nll_loss,
    dpo_loss,
    reward_model_loss,
    sequence_logprobs,
    sft_loss,
)
from openrlhf.core.losses.value import value_loss
from openrlhf.core.tables import LossAggMode

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
CORRECTED = {"is_correction_enable": True, "is_correction_threshold": (0.7, 1.4)}


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


def check(function: Callable[..., Any], *inputs: Tensor) -> None:
    assert gradcheck(function, tuple(x.requires_grad_() for x in inputs))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("kind", [None, "tis", "icepop", "seq-mask-tis"])
@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
def test_policy_loss(mode: LossAggMode, dual_clip: float | None, kind: Any, loss_type: Any) -> None:
    if loss_type == "gspo" and mode == "seq-mean-token-sum-norm":
        mode = "seq-mean-token-mean"
    config = PolicyLossConfig(loss_agg_mode=mode, dual_clip=dual_clip, policy_loss_type=loss_type)
    correction = None if kind is None else AdvantageConfig(is_correction_type=kind, **CORRECTED)
    old, rollout = randn(3, 5, seed=1), randn(3, 5, seed=1) + randn(3, 5, seed=2, scale=0.4)

    def loss(logprobs: Tensor) -> Tensor:
        return policy_loss(
            logprobs=logprobs, old_logprobs=old, advantages=randn(3, 5, seed=3), action_mask=MASK,
            rollout_logprobs=rollout, config=config, correction=correction, agg_constant=4.0,
        ).total  # fmt: skip

    check(loss, old + randn(3, 5, seed=4, scale=0.3))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(estimator: KLEstimator) -> None:
    ref = randn(3, 5, seed=1)
    check(lambda x: kl_estimate(x, ref, estimator), randn(3, 5))
    check(lambda x: kl_loss(logprobs=x, ref_logprobs=ref, action_mask=MASK, estimator=estimator).total, randn(3, 5))


def test_entropy_and_supervised_losses() -> None:
    check(lambda x: entropy_loss(entropy=x, action_mask=MASK).total, randn(3, 5))
    check(lambda x: sft_loss(logprobs=x, loss_mask=MASK).total, randn(3, 5))
    check(lambda x: chosen_nll_loss(logprobs=x, loss_mask=MASK).total, randn(3, 5))
    check(lambda x: sequence_logprobs(x, MASK), randn(3, 5))


@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_value_loss(value_clip: float | None) -> None:
    old, returns = randn(3, 5, seed=1), randn(3, 5, seed=2)

    def loss(x: Tensor) -> Tensor:
        return value_loss(values=x, old_values=old, returns=returns, action_mask=MASK, value_clip=value_clip).total

    check(loss, old + randn(3, 5, seed=3, scale=0.5))


@pytest.mark.parametrize(("label_smoothing", "ipo"), [(0.0, False), (0.2, False), (0.0, True)])
def test_dpo_loss(label_smoothing: float, ipo: bool) -> None:
    ref = randn(2, 4, seed=1)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        pairs = PairLogprobs(chosen=chosen, rejected=rejected, ref_chosen=ref[0], ref_rejected=ref[1])
        return dpo_loss(pairs, beta=0.3, label_smoothing=label_smoothing, ipo=ipo).total

    check(loss, randn(4, seed=2), randn(4, seed=3))


def test_reward_model_loss() -> None:
    margin = randn(4, seed=1).abs()
    check(lambda c, r: reward_model_loss(chosen=c, rejected=r, margin=margin).total, randn(4, seed=2), randn(4, seed=3))
    check(lambda c, r: reward_model_loss(chosen=c, rejected=r, loss_type="logexp").total, randn(4), randn(4, seed=3))


def test_plain_logprobs_and_entropy() -> None:
    targets = torch.tensor([0, 5, 2])
    check(lambda z: logprobs_from_logits(z, targets, 0.7), randn(3, 6))
    check(lambda z: entropy_from_logits(z, 0.7), randn(3, 6))


@pytest.mark.parametrize("tile", [(2, 3), (5, 7)])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_token_logprobs(tile: tuple[int, int], with_entropy: bool) -> None:
    targets = torch.tensor([0, 6, 2, 2, 5])

    def outputs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        both = token_logprobs(hidden, weight, targets, 0.7, bias, with_entropy, *tile)
        return tuple(x for x in both if x is not None)

    check(outputs, randn(5, 3), randn(7, 3, seed=1), randn(7, seed=2))
