"""Is a function of a user's a loss, an estimator? It is called on a toy batch, and refused with the reason in words.

What is asked of it is what the learner relies on: it may be given any part of a step's samples, in any order, padded to
any width, and the parts have to add up. Pure: nothing here reads files (see the launcher) or knows flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrlhf.core.advantages import Advantages
from openrlhf.core.config import AdvantageConfig, PolicyLossConfig
from openrlhf.core.losses.aggregate import effective_agg_mode, loss_count
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.policy import PolicyLossFunction, policy_loss

TOLERANCE = 1e-5
"""Relative: toy numbers are float64, but a function may compute in float32."""

ROWS, WIDTH = 6, 7
Toy = dict[str, Tensor]


class PluginError(ValueError):
    """Why a function cannot be used, in words: a clause that goes on from `<function> `."""


def check_policy_loss(
    function: PolicyLossFunction,
    config: PolicyLossConfig,
    correction: AdvantageConfig | None = None,
    agg_constant: float = 1.0,
) -> None:
    """Refuse a function that is no policy loss by the contract of `losses.policy.policy_loss` and `LossOutput`.

    config, correction, agg_constant: those of the run, which it is called with. Checked in this order: its signature,
    that it runs, what it returns, that it changes no argument, its count, that it is finite, differentiable, says the
    same twice, adds up over micro-batches, ignores what is not in the action mask, knows no order and no padding, that
    a micro-batch without trainable tokens is a zero, and that it weighs by the rollout engine where ours would.

    Raises:
        PluginError: what is wrong.
    """
    options = {"config": config, "correction": correction, "agg_constant": agg_constant}
    toy = _toy(ROWS)
    _check_signature(function, (*toy, *options))

    def call(x: Toy) -> LossOutput:
        out = _called(function, x, options)
        _check_output(out)
        _check_count(out.count, x["action_mask"], config)
        return out

    def measured(x: Toy) -> tuple[Tensor, Tensor]:
        return _gradient(call(x), x["logprobs"])

    whole, gradient = measured(toy)
    mask = toy["action_mask"]
    _require(not gradient[~mask].any(), "gives a gradient to tokens outside of action_mask")
    _require(bool(gradient.any()), "gives no token a gradient: nothing would be trained")
    _require_same(measured(toy), (whole, gradient), "gives another result for the same arguments")
    for size in (4, 2, 1):  # the last with a part that has no trainable token
        totals, gradients = zip(*(measured(part) for part in _parts(toy, size)), strict=True)
        why = _why_not_additive(float(whole), torch.stack(totals), [call(p).count for p in _parts(toy, size)])
        _require_same((torch.stack(totals).sum(), torch.cat(gradients)), (whole, gradient), why)
    _require_same(
        measured(_with_junk(toy)), (whole, gradient), "depends on what stands outside of action_mask", mask=mask
    )
    order = torch.tensor([4, 1, 5, 0, 3, 2])
    total, permuted = measured({name: x[order] for name, x in toy.items()})
    _require_same((total, permuted), (whole, gradient[order]), "depends on the order of the rows")
    total, padded = measured({name: pad(x, (0, 5)) for name, x in toy.items()})
    _require_same((total, padded[:, :WIDTH]), (whole, gradient), "depends on how far the rows are padded")
    without = {name: x[1:2] for name, x in toy.items()}  # a row without a trainable token
    _require_same(
        measured(without), (torch.zeros(()), torch.zeros(1, WIDTH)), f"{_EMPTY} is not 0 with a gradient of 0"
    )
    on_policy = toy | {"old_logprobs": toy["logprobs"].detach().clone()}
    _require(bool(measured(on_policy)[1].any()), "gives no gradient where the policy has not moved yet")
    agreed = toy | {"rollout_logprobs": toy["old_logprobs"]}
    corrected = _gradient(policy_loss(**toy, **options), toy["logprobs"])[1]
    weighs = not torch.equal(corrected, _gradient(policy_loss(**agreed, **options), toy["logprobs"])[1])
    ignored = weighs and torch.equal(gradient, measured(agreed)[1])
    _require(not ignored, "ignores rollout_logprobs and correction, which `advantage.is_correction_enable` asks for")


def check_advantages(function: Advantages) -> None:
    """Refuse a function that does not keep the contract of `advantages.RETURNS`: token rewards in, advantages out.

    Raises:
        PluginError: what is wrong.
    """
    toy = {"token_rewards": _normal(0), "action_mask": _mask(), "values": _normal(1)}
    options = {"gamma": 0.9, "lambd": 0.8}
    _check_signature(function, (*toy, *options))

    def measured(x: Toy) -> tuple[Tensor, Tensor]:
        out = _called(function, x, options)
        pair = isinstance(out, tuple) and len(out) == 2 and all(isinstance(part, Tensor) for part in out)
        _require(pair, f"returns {_what(out)}, not two tensors: advantages and returns")
        for name, part in zip(("advantages", "returns"), out, strict=True):
            shape = tuple(x["action_mask"].shape)
            _require(tuple(part.shape) == shape, f"returns {name} of shape {tuple(part.shape)}, not [B, T] = {shape}")
            _require_finite(part, f"returns {name}")
            _require(not part[~x["action_mask"]].any(), f"returns {name} that are not 0 outside of action_mask")
        return out

    whole = measured(toy)
    _require(bool(whole[0].any()), "returns advantages that are 0 everywhere: nothing would be trained")
    _require_same(measured(toy), whole, "gives another result for the same arguments")
    for size in (4, 2, 1):  # the last with a part that has no trainable token
        parts = [measured(part) for part in _parts(toy, size)]
        joined = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        _require_same(joined, whole, "normalises inside the batch: a row's advantages change with the rows beside it")
    _require_same(measured(_with_junk(toy)), whole, "depends on what stands outside of action_mask")
    padded = measured({name: pad(x, (0, 5)) for name, x in toy.items()})
    _require_same(tuple(x[:, :WIDTH] for x in padded), whole, "depends on how far the rows are padded")


_EMPTY = "for a micro-batch without a trainable token: its total"


def _toy(seed: int) -> Toy:
    """Arguments of a policy loss, [6, 7] float64: off policy, advantages of both signs, a row that trains nothing."""
    logprobs = -1.2 + 0.3 * _normal(seed)
    mask = _mask()
    toy = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.2 * _normal(seed + 1),
        "advantages": _normal(seed + 2),
        "rollout_logprobs": logprobs + 0.2 * _normal(seed + 3),
    }
    return {name: torch.where(mask, x, torch.zeros_like(x)) for name, x in toy.items()} | {"action_mask": mask}


def _normal(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _mask() -> Tensor:
    """Rows of different lengths, with gaps; row 1 has no trainable token."""
    mask = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[:, 0] = False
    mask[:, 2] = True
    mask[1] = False
    return mask


def _parts(toy: Toy, size: int) -> Iterator[Toy]:
    for rows in torch.arange(ROWS).split(size):
        yield {name: x[rows] for name, x in toy.items()}


def _with_junk(toy: Toy) -> Toy:
    mask = toy["action_mask"]
    return {name: x if x is mask else torch.where(mask, x, _normal(9)) for name, x in toy.items()}


def _check_signature(function: Callable[..., Any], names: Sequence[str]) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise PluginError(
            f"has a signature that does not fit ({error}): it is called with {', '.join(names)} by name; what it does "
            "not need it can take as **others"
        ) from error


def _called(function: Callable[..., Any], toy: Toy, options: dict[str, Any]) -> Any:
    """The result on copies of the arguments, which must stay as they are."""
    given = {name: x.clone() for name, x in toy.items()}
    if "logprobs" in given:
        given["logprobs"] = toy["logprobs"].detach().requires_grad_()
        toy["logprobs"] = given["logprobs"]
    try:
        out = function(**given, **options)
    except Exception as error:
        raise PluginError(f"raises {type(error).__name__}: {error}") from error
    for name, x in given.items():
        _require(x._version == 0 and torch.equal(x, toy[name]), f"changes its argument {name} in place")
    return out


def _check_output(out: Any) -> None:
    _require(isinstance(out, LossOutput), f"returns {_what(out)}, not a LossOutput(total=..., count=..., metrics=...)")
    _require(isinstance(out.total, Tensor), f"returns a total that is {_what(out.total)}, not a tensor with a gradient")
    _require(
        out.total.ndim == 0, f"returns a total of shape {tuple(out.total.shape)}, not a scalar: sum it over its units"
    )
    for name, pair in out.metrics.items():
        fine = isinstance(pair, tuple) and len(pair) == 2
        _require(fine, f"returns the metric {name!r} as {_what(pair)}, not as (sum, count)")
        _require(not torch.as_tensor(pair[0]).requires_grad, f"returns the metric {name!r} with a gradient: detach it")


def _check_count(count: float, mask: Tensor, config: PolicyLossConfig) -> None:
    mode = effective_agg_mode(config)
    want = loss_count(mask, mode)
    right = isinstance(count, float | int) and float(count) == want
    if right:
        return
    hint = ""
    if isinstance(count, float | int):
        if count == mask.numel():
            hint = ": it counts tokens outside of action_mask"
        elif count == 1 and want:
            hint = ": a mean over the micro-batch is no sum over its units"
    raise PluginError(
        f"returns the count {_shown(count)} where it should be {want:g}{hint}; `loss_agg_mode` {mode!r} counts by "
        "openrlhf.core.losses.aggregate.loss_count(action_mask, config.loss_agg_mode)"
    )


def _gradient(out: LossOutput, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    _require_finite(out.total.detach(), "returns a total")
    _require(out.total.requires_grad, "returns a total without a gradient: it is detached from logprobs")
    (gradient,) = torch.autograd.grad(out.total, logprobs, allow_unused=True)
    if gradient is None:
        raise PluginError("returns a total without a gradient: it does not depend on logprobs")
    _require_finite(gradient, "has a gradient")
    return out.total.detach(), gradient


def _why_not_additive(whole: float, totals: Tensor, counts: Sequence[float]) -> str:
    """Words for parts that do not add up; a mean is recognised by what its parts would add up to."""
    units = torch.tensor(counts, dtype=totals.dtype)
    mean = abs(float((totals * units).sum()) - whole * float(units.sum())) <= TOLERANCE * max(1.0, abs(whole))
    what = "returns the mean over the micro-batch" if mean else "normalises inside the micro-batch"
    return (
        f"{what}: the whole batch has the total {whole:.6g}, its parts add up to {float(totals.sum()):.6g} or have "
        "other gradients. Return a sum over units, and use nothing that is computed over several rows"
    )


def _require_same(found: Any, want: Any, why: str, *, mask: Tensor | None = None) -> None:
    for have, expected in zip(found, want, strict=True):
        if mask is not None and have.shape == mask.shape:
            have, expected = have[mask], expected[mask]
        scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        _require(float((have - expected).abs().max()) <= TOLERANCE * scale, why)


def _require_finite(x: Tensor, what: str) -> None:
    bad = x[~x.isfinite()].flatten().tolist()
    _require(not bad, f"{what} that is not finite: {bad[:1]}")


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise PluginError(why)


def _what(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _shown(count: Any) -> str:
    return f"{count:g}" if isinstance(count, float | int) else _what(count)
