"""Advantages and returns from token rewards, and their whitening.

Time runs over the trainable tokens only: environment tokens (action_mask False between two actions) are no states,
cost no discount and hold no value. Baselines over the samples of a prompt are in `rewards`, before this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf.core.masks import check_rows, select
from openrlhf.core.tables import ESTIMATORS, Returns, estimator_row

MIN_VARIANCE = 1e-8
"""Whitening divides by sqrt(max(variance, MIN_VARIANCE))."""


Advantages = Callable[..., tuple[Tensor, Tensor]]
"""(token_rewards, action_mask, values, gamma, lambd) -> (advantages, returns), [B, T]."""


def identity(x: Tensor) -> Tensor:
    """The `reduce` of a single rank."""
    return x


def compute_advantages(
    estimator: str,
    token_rewards: Tensor,
    action_mask: Tensor,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lambd: float = 1.0,
    own: Advantages | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each [B, T] in the dtype of token_rewards, 0 where not action_mask.

    token_rewards, action_mask (bool), values: [B, T]. Under the mask they are ignored, whatever they hold.
    The estimator's row says which of `RETURNS` it takes: with a critic `gae`, else the discounted return from here on
    (see `discounted_returns`), for both results. Estimators that compare the samples of a prompt differ in what
    `rewards.group_baseline` made of the rewards before; unlike in their papers a KL penalty may be among the token
    rewards, after the baseline. own: a user's function in the place of the row's, which may use gamma.

    Raises:
        ValueError: gamma != 1 with an estimator that does not use it, a critic's estimator without values, an unknown
            estimator.
    """
    row = estimator_row(estimator)
    check_rows(action_mask, token_rewards=token_rewards, values=values)
    if gamma != 1.0 and not row.discounts and own is None:
        using = " and ".join(name for name, other in ESTIMATORS.items() if other.discounts)
        raise ValueError(
            f"`advantage.gamma` {gamma!r} is used by {using} only: leave it at 1 with "
            f"`advantage.estimator` {estimator!r}"
        )
    if row.critic and values is None:
        raise ValueError(f"`advantage.estimator` {estimator!r} needs the values of a critic, got None")
    if own is None:
        advantages, returns = RETURNS[row.returns](token_rewards, action_mask, values, gamma, lambd)
    else:
        given = {"token_rewards": token_rewards, "action_mask": action_mask, "values": values}
        advantages, returns = own(**given, gamma=gamma, lambd=lambd)
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


def discounted_returns(token_rewards: Tensor, action_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma * G_{t'} with t' the next trainable token; [B, T] float64, 0 where not action_mask.

    The return of REINFORCE (Williams, 1992; Sutton & Barto, 2018, section 13.3). Differs in that tokens which the
    policy did not sample are no time steps: they cost no discount, and their rewards are ignored.
    """
    rewards = select(token_rewards.double(), action_mask)
    if gamma == 1.0:
        return select(rewards.flip(-1).cumsum(-1).flip(-1), action_mask)
    return _backward_recursion(rewards, action_mask, gamma)


def gae(
    token_rewards: Tensor, action_mask: Tensor, values: Tensor, gamma: float = 1.0, lambd: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Schulman et al., "High-Dimensional Continuous Control Using GAE" (2015), eq. 16, over the trainable tokens.

    delta_t = r_t + gamma V_{t'} - V_t; A_t = delta_t + gamma lambd A_{t'}, with t' the next trainable token (after the
    last one both are 0). Returns (A, A + V), [B, T] float64, 0 where not action_mask. Differs from the paper in that
    tokens which the policy did not sample are no states, and in that a cut-off sample is not bootstrapped from a value.
    """
    rewards = select(token_rewards.double(), action_mask)
    values = select(values.double(), action_mask)
    deltas = rewards + gamma * _next_value(values, action_mask) - values
    advantages = _backward_recursion(deltas, action_mask, gamma * lambd)
    return advantages, select(advantages + values, action_mask)


def whiten(
    advantages: Tensor,
    action_mask: Tensor,
    no_std_norm: bool = False,
    reduce: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """(A - mean) / sqrt(max(variance, 1e-8)) over all trainable tokens, [B, T], 0 where not action_mask.

    The global normalisation of REINFORCE++ (Hu et al., 2025), there without a floor of the variance.
    Mean and population variance are over the tokens of all ranks: `reduce` sums a float64 tensor over them and is
    called twice, on every rank, also on one without tokens. no_std_norm: A - mean only.
    """
    check_rows(action_mask, advantages=advantages)
    x = select(advantages.double(), action_mask)
    total, count = reduce(torch.stack([x.sum(), action_mask.sum().double()])).unbind()
    count = count.clamp_min(1.0)
    centred = select(x - total / count, action_mask)
    variance = reduce(centred.square().sum().reshape(1))[0] / count
    if not no_std_norm:
        centred = centred / variance.clamp_min(MIN_VARIANCE).sqrt()
    return centred.to(advantages.dtype)


def _backward_recursion(x: Tensor, action_mask: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t'} over trainable tokens, 0 elsewhere."""
    carry = x.new_zeros(x.shape[0])
    columns: list[Tensor] = []
    for x_t, mask_t in zip(reversed(x.unbind(-1)), reversed(action_mask.unbind(-1)), strict=True):
        carry = torch.where(mask_t, x_t + decay * carry, carry)
        columns.append(carry)
    return select(torch.stack(columns[::-1], -1), action_mask) if columns else torch.zeros_like(x)


def _next_value(values: Tensor, action_mask: Tensor) -> Tensor:
    """The value at the next trainable token, 0 after the last one; [B, T]."""
    carry = values.new_zeros(values.shape[0])
    columns: list[Tensor] = []
    for v_t, mask_t in zip(reversed(values.unbind(-1)), reversed(action_mask.unbind(-1)), strict=True):
        columns.append(carry)
        carry = torch.where(mask_t, v_t, carry)
    return torch.stack(columns[::-1], -1) if columns else torch.zeros_like(values)


def _discounted(
    token_rewards: Tensor, action_mask: Tensor, values: Tensor | None, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    del values, lambd
    returns = discounted_returns(token_rewards, action_mask, gamma)
    return returns, returns


def _immediate(
    token_rewards: Tensor, action_mask: Tensor, values: Tensor | None, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Every token keeps its own reward: nothing is summed over later ones."""
    del values, gamma, lambd
    rewards = select(token_rewards, action_mask)
    return rewards, rewards


RETURNS: dict[Returns, Advantages] = {"gae": gae, "discounted": _discounted, "immediate": _immediate}
