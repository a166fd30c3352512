"""A function of a user's is a loss or an estimator, or is refused with the reason that is the matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.core.advantages import RETURNS, whiten
from openrlhf.core.config import AdvantageConfig, PolicyLossConfig
from openrlhf.core.losses.aggregate import aggregate, loss_count
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.policy import policy_loss
from openrlhf.core.plugins import PluginError, check_advantages, check_policy_loss
from openrlhf.core.tables import POLICY_LOSSES

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_our_losses_pass(name: str) -> None:
    check_policy_loss(policy_loss, PolicyLossConfig(policy_loss_type=name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [None, "tis", "icepop", "seq-mask-tis"])
def test_ppo_passes_in_every_run(mode: Any, kind: Any) -> None:
    fix = None if kind is None else AdvantageConfig(is_correction_enable=True, is_correction_type=kind)
    check_policy_loss(policy_loss, PolicyLossConfig(loss_agg_mode=mode), fix, agg_constant=8.0)


@pytest.mark.parametrize("name", RETURNS)
def test_our_estimators_pass(name: Any) -> None:
    check_advantages(RETURNS[name])


def reinforce(**given: Any) -> LossOutput:
    """What the wrong ones below are made of."""
    token_loss, mask, mode = (
        -given["advantages"] * given["logprobs"],
        given["action_mask"],
        given["config"].loss_agg_mode,
    )
    total = aggregate(token_loss, mask, mode, given["agg_constant"])
    return LossOutput(total=total, count=loss_count(mask, mode))


def with_(total: Callable[[Tensor, dict[str, Any]], Any], count: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """`reinforce` with another total or count."""

    def loss(**given: Any) -> Any:
        out = reinforce(**given)
        return LossOutput(total=total(out.total, given), count=out.count if count is None else count(given))

    return loss


def whitening(**given: Any) -> LossOutput:
    return reinforce(**given | {"advantages": whiten(given["advantages"], given["action_mask"])})


def centring_rows(**given: Any) -> LossOutput:
    mask = given["action_mask"]
    mean = given["advantages"].sum() / mask.sum().clamp_min(1)
    return reinforce(**given | {"advantages": (given["advantages"] - mean) * mask})


def mutating(**given: Any) -> LossOutput:
    given["advantages"].mul_(2)
    return reinforce(**given)


def ranking(**given: Any) -> LossOutput:
    weights = torch.arange(1.0, len(given["advantages"]) + 1)[:, None]
    return reinforce(**given | {"advantages": given["advantages"] * weights})


def width(**given: Any) -> LossOutput:
    return reinforce(**given | {"advantages": given["advantages"] * given["advantages"].shape[1]})


def calls() -> Callable[..., LossOutput]:
    count = [0]

    def loss(**given: Any) -> LossOutput:
        count[0] += 1
        return reinforce(**given | {"advantages": given["advantages"] * count[0]})

    return loss


def no_gradient_on_policy(**given: Any) -> LossOutput:
    moved = (given["logprobs"] - given["old_logprobs"]).detach()
    return reinforce(**given | {"advantages": given["advantages"] * moved})


def divided_by_tokens(**given: Any) -> LossOutput:
    out = reinforce(**given)
    return LossOutput(total=out.total / given["action_mask"].sum(), count=out.count)


def measuring(value: Any) -> Callable[..., LossOutput]:
    def loss(**given: Any) -> LossOutput:
        out = reinforce(**given)
        return LossOutput(total=out.total, count=out.count, metrics={"mine": value(out)})

    return loss


def positional(logprobs: Tensor, old: Tensor) -> LossOutput:
    raise AssertionError("never called")


def raising(**given: Any) -> LossOutput:
    raise RuntimeError("my own fault")


WRONG_LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "wrong signature": (
        positional,
        r"has a signature that does not fit .*: it is called with logprobs, old_logprobs, ",
    ),
    "raises": (raising, r"raises RuntimeError: my own fault"),
    "returns a float": (lambda **x: 0.5, r"returns a float, not a LossOutput"),
    "total is a float": (with_(lambda total, x: float(total.detach())), r"a total that is a float, not a tensor"),
    "one loss per token": (with_(lambda total, x: -x["logprobs"]), r"a total of shape \(6, 7\), not a scalar"),
    "nan": (with_(lambda total, x: total * torch.nan), r"a total that is not finite: \[nan\]"),
    "inf": (with_(lambda total, x: total / 0), r"a total that is not finite: \[-?inf\]"),
    "nan in the gradient": (
        with_(lambda total, x: total + (x["logprobs"] * 0).pow(0.5).sum()),
        r"has a gradient that is not finite: \[nan\]",
    ),
    "detached": (with_(lambda total, x: total.detach()), r"without a gradient: it is detached from logprobs"),
    "of something else": (
        with_(lambda total, x: total.detach() * torch.ones((), requires_grad=True)),
        r"without a gradient: it does not depend on logprobs",
    ),
    "trains nothing": (with_(lambda total, x: total * 0), r"gives no token a gradient"),
    "counts every token": (
        with_(lambda t, x: t, lambda x: x["logprobs"].numel()),
        r"the count 42 .* outside of action_",
    ),
    "counts one": (with_(lambda t, x: t, lambda x: 1.0), r"the count 1 .* a mean over the micro-batch is no sum"),
    "count is a tensor": (with_(lambda t, x: t, lambda x: x["action_mask"].sum()), r"the count a tensor of shape \(\)"),
    "mean over the micro-batch": (divided_by_tokens, r"returns the mean over the micro-batch: .* Return a sum"),
    "whitens": (whitening, r"normalises inside the micro-batch: "),
    "centres": (centring_rows, r"normalises inside the micro-batch: "),
    "changes its arguments": (mutating, r"changes its argument advantages in place"),
    "order of rows": (ranking, r"normalises inside the micro-batch|the order of the rows"),
    "padding": (width, r"depends on how far the rows are padded"),
    "outside of the mask": (
        with_(lambda total, x: total + x["logprobs"].sum()),
        r"gives a gradient to tokens outside of action_mask",
    ),
    "reads outside of the mask": (
        with_(lambda total, x: total + ((x["logprobs"] * x["action_mask"]).sum(1) * x["old_logprobs"].sum(1)).sum()),
        r"depends on what stands outside of action_mask",
    ),
    "another result each time": (calls(), r"gives another result for the same arguments"),
    "bad in an empty micro-batch": (
        with_(lambda total, x: total * (x["action_mask"].sum() / x["action_mask"].sum())),
        r"a total that is not finite|is not 0 with a gradient of 0",
    ),
    "nothing on policy": (no_gradient_on_policy, r"no gradient where the policy has not moved yet"),
    "metric with a gradient": (measuring(lambda out: (out.total, 1.0)), r"the metric 'mine' with a gradient: detach"),
    "metric without a count": (measuring(lambda out: 1.0), r"the metric 'mine' as a float, not as \(sum, count\)"),
}


def test_the_right_one_passes() -> None:
    check_policy_loss(reinforce, PolicyLossConfig())


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_wrong_loss_is_refused_for_its_reason(name: str) -> None:
    function, reason = WRONG_LOSSES[name]
    with pytest.raises(PluginError, match=reason):
        check_policy_loss(function, PolicyLossConfig())


@pytest.mark.parametrize("mode", MODES)
def test_a_count_is_that_of_the_run(mode: Any) -> None:
    tokens = with_(lambda total, x: total, lambda x: float(x["action_mask"].sum()))
    if mode == "token-mean":
        check_policy_loss(tokens, PolicyLossConfig(loss_agg_mode=mode))
        return
    with pytest.raises(PluginError, match=rf"the count \d+ where it should be 5; `loss_agg_mode` '{mode}' counts by"):
        check_policy_loss(tokens, PolicyLossConfig(loss_agg_mode=mode))


def test_a_loss_that_leaves_out_the_correction_of_the_run_is_refused() -> None:
    fix = AdvantageConfig(is_correction_enable=True)
    with pytest.raises(PluginError, match=r"ignores rollout_logprobs .* `advantage\.is_correction_enable` asks for"):
        check_policy_loss(reinforce, PolicyLossConfig(), fix)
    check_policy_loss(reinforce, PolicyLossConfig(), replace(fix, is_correction_threshold=(1.0, 1.0)))  # weights of 1


def discounted(**given: Any) -> tuple[Tensor, Tensor]:
    return RETURNS["discounted"](given["token_rewards"], given["action_mask"], None, given["gamma"], 1.0)


def changed(change: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[..., Any]:
    def function(**given: Any) -> Any:
        advantages, returns = discounted(**given)
        return change(advantages, given), returns

    return function


def mutating_rewards(**given: Any) -> tuple[Tensor, Tensor]:
    given["token_rewards"].zero_()
    return discounted(**given)


WRONG_ESTIMATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "wrong signature": (lambda rewards: rewards, r"has a signature that does not fit"),
    "raises": (raising, r"raises RuntimeError: my own fault"),
    "one tensor": (lambda **x: x["token_rewards"], r"returns a tensor of shape \(6, 7\), not two tensors"),
    "per sample": (changed(lambda a, x: a[:, 0]), r"returns advantages of shape \(6,\), not \[B, T\] = \(6, 7\)"),
    "nan": (changed(lambda a, x: a / 0), r"returns advantages that is not finite"),
    "outside of the mask": (changed(lambda a, x: a + 1), r"advantages that are not 0 outside of action_mask"),
    "nothing": (changed(lambda a, x: a * 0), r"advantages that are 0 everywhere"),
    "whitens": (changed(lambda a, x: whiten(a, x["action_mask"])), r"normalises inside the batch"),
    "rewards outside of the mask": (
        lambda **x: (2 * (x["token_rewards"].sum(-1, keepdim=True) * x["action_mask"]),) * 2,
        r"depends on what stands outside of action_mask",
    ),
    "padding": (changed(lambda a, x: a * a.shape[1]), r"depends on how far the rows are padded"),
    "changes its arguments": (mutating_rewards, r"changes its argument token_rewards in place"),
}


def test_the_right_estimator_passes() -> None:
    check_advantages(discounted)


@pytest.mark.parametrize("name", WRONG_ESTIMATORS)
def test_a_wrong_estimator_is_refused_for_its_reason(name: str) -> None:
    function, reason = WRONG_ESTIMATORS[name]
    with pytest.raises(PluginError, match=reason):
        check_advantages(function)
