"""Where the algorithms must end, and which gradient they must have on average, known analytically.

Expectations are exact where the outcomes can be enumerated: every row is one outcome, weighted by its probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from openrlhf.core.advantages import compute_advantages, whiten
from openrlhf.core.config import KLEstimator, PolicyLossConfig
from openrlhf.core.kl import kl_estimate
from openrlhf.core.losses.policy import kl_loss, policy_loss
from openrlhf.core.rewards import group_baseline, token_rewards
from support.core_helpers import AdamState, adam_step, check, gradient

F64 = torch.float64
REF = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=F64)
REWARD = torch.tensor([0.0, 0.2, 0.5, 1.0], dtype=F64)
ONE = torch.ones(4, 1, dtype=torch.bool)


def optimise(grad: Callable[[Tensor], Tensor], start: Tensor, steps: int, lr: float = 0.05) -> Tensor:
    """Adam with a linear decay to 1 % of lr."""
    x, state = start.clone().requires_grad_(), AdamState(lr=lr)
    for i in range(steps):
        state.lr = lr * max(1 - i / steps, 0.01)
        x = adam_step(x, grad(x), state)
    return x.detach()


def surrogate(logp: Tensor, advantages: Tensor, weights: Tensor, loss_type: str = "ppo") -> Tensor:
    """Policy loss of rows [B, T] with these weights [B], as an expectation."""
    out = policy_loss(
        logprobs=logp,
        old_logprobs=logp.detach(),
        advantages=advantages * weights[:, None],
        action_mask=torch.ones(logp.shape, dtype=torch.bool),
        config=PolicyLossConfig(policy_loss_type=loss_type),
    )
    return out.total


def bandit_gradient(logits: Tensor, beta: float, estimator: str, loss_type: str) -> Tensor:
    """One prompt, one token: KL as a reward penalty (k1), expectation over the four actions."""
    logp = logits.log_softmax(-1)[:, None]
    kl = kl_estimate(logp.detach(), REF.log()[:, None], "k1")
    rewards = token_rewards(REWARD, kl, beta, ONE)
    values = torch.full((4, 1), 0.25, dtype=F64)
    advantages, _ = compute_advantages(estimator, rewards, ONE, values)
    return gradient(surrogate(logp, advantages, logp.detach().exp()[:, 0], loss_type), logits)


OPTIMA = {
    1.0: [0.40011, 0.29322, 0.19790, 0.10876],
    0.5: [0.28990, 0.25949, 0.23641, 0.21421],
    0.1: [0.00044, 0.00197, 0.01977, 0.97782],
}


@pytest.mark.parametrize(
    ("beta", "estimator", "loss_type"),
    [
        *((beta, estimator, "ppo") for beta in OPTIMA for estimator in ("gae", "reinforce")),
        (0.5, "rloo", "ppo"),
        (0.5, "dr_grpo", "ppo"),
        (0.5, "reinforce", "gspo"),
    ],
)
def test_kl_regularised_bandit(beta: float, estimator: str, loss_type: str) -> None:
    optimum = OPTIMA[beta]
    logits = optimise(lambda x: bandit_gradient(x, beta, estimator, loss_type), REF.log(), steps=400)
    check(logits.softmax(-1), optimum, 1e-3)
    p = logits.softmax(-1)
    objective = float((p * REWARD).sum() - beta * (p * (p / REF).log()).sum())
    assert objective == pytest.approx(beta * float((REF * (REWARD / beta).exp()).sum().log()), abs=1e-4)


def test_whitened_advantages_keep_the_fixed_point() -> None:
    """Whitening scales r - beta KL by one factor: at the optimum all advantages are 0 already."""
    optimum = torch.softmax(REF.log() + REWARD / 0.5, -1)
    counts = (optimum * 10_000).round().long()
    logp = torch.repeat_interleave(optimum.log(), counts)[:, None]
    kl = kl_estimate(logp, torch.repeat_interleave(REF.log(), counts)[:, None], "k1")
    m = torch.ones_like(logp, dtype=torch.bool)
    rewards = token_rewards(torch.repeat_interleave(REWARD, counts), kl, 0.5, m)
    returns, _ = compute_advantages("reinforce", rewards, m)
    check(whiten(returns, m), torch.zeros(logp.shape), 1e-6)


SEQUENCES = torch.tensor(list(product([0, 1], repeat=2)))


def sequence_logprobs(parameters: Tensor) -> Tensor:
    """[4, 2]: log-probs of the four sequences of two tokens; parameters [3, 2]: logits first, after 0, after 1."""
    logp = parameters.log_softmax(-1)
    first = logp[0][SEQUENCES[:, 0]]
    return torch.stack([first, logp[1 + SEQUENCES[:, 0], SEQUENCES[:, 1]]], -1)


@pytest.mark.parametrize("estimator", ["gae", "reinforce"])
def test_two_token_sequence(estimator: str) -> None:
    reward, m = (SEQUENCES.sum(-1) == 2).double(), torch.ones(4, 2, dtype=torch.bool)
    values = torch.tensor([[0.3, 0.1]], dtype=F64).expand(4, 2)

    def grad(parameters: Tensor) -> Tensor:
        logp = sequence_logprobs(parameters)
        kl = kl_estimate(logp.detach(), torch.full((4, 2), math.log(0.5), dtype=F64), "k1")
        advantages, _ = compute_advantages(estimator, token_rewards(reward, kl, 0.5, m), m, values)
        return gradient(surrogate(logp, advantages, logp.detach().sum(-1).exp()), parameters)

    parameters = optimise(grad, torch.zeros(3, 2, dtype=F64), steps=400)
    p = sequence_logprobs(parameters).sum(-1).exp()
    check(p, [0.09626, 0.09626, 0.09626, 0.71123], 1e-3)
    conditional = parameters.softmax(-1)[:, 1]
    check(conditional, [0.80749, 0.5, 0.88080], 1e-3)
    kl = float((p * (4 * p).log()).sum())
    assert kl == pytest.approx(0.46801, abs=2e-3)
    assert float(p[3]) - 0.5 * kl == pytest.approx(0.47723, abs=1e-3)


def expected_kl_gradient(logits: Tensor, estimator: KLEstimator) -> Tensor:
    """E over on-policy samples of the gradient of kl_loss."""
    logp = logits.log_softmax(-1)
    p = logp.detach().exp()
    outputs = [
        kl_loss(logprobs=new.view(1, 1), ref_logprobs=ref.view(1, 1), action_mask=ONE[:1], estimator=estimator)
        for new, ref in zip(logp, REF.log(), strict=True)
    ]
    return gradient(torch.stack([p[k] * o.total for k, o in enumerate(outputs)]).sum(), logits)


def test_gradients_of_kl_as_a_loss() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=F64, requires_grad=True)
    p = logits.detach().softmax(-1)
    d = (p / REF).log()
    check(expected_kl_gradient(logits, "k1"), [0, 0, 0, 0], 1e-12)
    check(expected_kl_gradient(logits, "k2"), p * (d - (p * d).sum()), 1e-12)  # of KL(p || ref)
    check(expected_kl_gradient(logits, "k3"), p - REF, 1e-12)  # of KL(ref || p)


@pytest.mark.parametrize(
    ("beta", "optimum"),
    [
        (1.0, [0.38204, 0.27057, 0.18547, 0.16193]),
        (0.5, [0.23691, 0.17539, 0.13508, 0.45262]),
        (0.1, [0.04972, 0.03724, 0.02966, 0.88338]),
    ],
)
def test_k3_as_loss(beta: float, optimum: list[float]) -> None:
    def grad(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)[:, None]
        advantages, _ = compute_advantages("dr_grpo", token_rewards(REWARD, None, 0.0, ONE), ONE)
        policy = gradient(surrogate(logp, advantages, logp.detach().exp()[:, 0]), logits)
        return policy + beta * expected_kl_gradient(logits, "k3")

    # Small steps: past a k3 of 10, where the estimate is clamped, the pull back to the reference is gone.
    check(optimise(grad, REF.log(), steps=400, lr=0.02).softmax(-1), optimum, 1e-3)


@pytest.mark.parametrize("beta", [0.5, 0.1])
def test_k3_as_loss_with_sampled_groups(beta: float) -> None:
    """A trainer with RLOO advantages on 256 samples per step ends within 0.01."""
    generator = torch.Generator().manual_seed(0)
    tail: list[Tensor] = []
    optimum = {0.5: [0.23691, 0.17539, 0.13508, 0.45262], 0.1: [0.04972, 0.03724, 0.02966, 0.88338]}[beta]
    m = torch.ones(256, 1, dtype=torch.bool)

    def grad(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        actions = torch.multinomial(logp.detach().exp(), 256, replacement=True, generator=generator)
        baseline = group_baseline("rloo", REWARD[actions], [0] * 256)
        taken = logp[actions][:, None]
        advantages, _ = compute_advantages("rloo", token_rewards(baseline.rewards, None, 0.0, m), m)
        policy = surrogate(taken, advantages, torch.ones(256, dtype=F64))
        kl = kl_loss(logprobs=taken, ref_logprobs=REF.log()[actions][:, None], action_mask=m, estimator="k3")
        tail.append(logp.detach().exp())
        return gradient((policy + beta * kl.total) / kl.count, logits)

    optimise(grad, REF.log(), steps=500, lr=0.02)
    check(torch.stack(tail[-150:]).mean(0), optimum, 0.01)


P = torch.full((4,), 0.25, dtype=F64)
TRUE_GRADIENT = torch.tensor([-0.10625, -0.05625, 0.01875, 0.14375], dtype=F64)


def group_gradients(estimator: str, actions: Tensor) -> Tensor:
    """[G, 4]: per group [G, n] of actions, the mean over its samples of A (1[k = a] - p_k)."""
    groups, n = actions.shape
    ids = torch.arange(groups).repeat_interleave(n)
    advantages = group_baseline(estimator, REWARD[actions.flatten()], ids).rewards.double()
    score = torch.nn.functional.one_hot(actions.flatten(), 4) - P
    return (advantages[:, None] * score).view(groups, n, 4).mean(1)


# RLOO is unbiased; a mean that includes the own sample shrinks the gradient by (n - 1) / n.
@pytest.mark.parametrize(("estimator", "factor"), [("rloo", 1), ("dr_grpo", 3 / 4), ("reinforce_baseline", 3 / 4)])
def test_expected_gradient_exactly(estimator: str, factor: float) -> None:
    actions = torch.tensor(list(product(range(4), repeat=4)))  # all groups of 4, equally likely
    check(group_gradients(estimator, actions).mean(0), factor * TRUE_GRADIENT, 1e-7)


@pytest.mark.parametrize(("estimator", "factor"), [("rloo", 1), ("dr_grpo", 7 / 8), ("reinforce_baseline", 7 / 8)])
def test_expected_gradient_by_monte_carlo(estimator: str, factor: float) -> None:
    actions = torch.randint(0, 4, (50_000, 8), generator=torch.Generator().manual_seed(0))
    error = group_gradients(estimator, actions).mean(0) - factor * TRUE_GRADIENT
    assert float(error.norm() / (factor * TRUE_GRADIENT).norm()) < 0.01


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_maxrl_follows_the_log_of_the_success_rate(p: float, n: int) -> None:
    """On the success logit: (1 - (1 - p)^(n - 1)) times the gradient of log p, which is 1 - p; exactly."""
    outcomes = torch.tensor(list(product((0.0, 1.0), repeat=n)), dtype=F64)
    ids = torch.arange(len(outcomes)).repeat_interleave(n)
    advantages = group_baseline("maxrl", outcomes.flatten(), ids).rewards.view(-1, n)
    law = (outcomes * math.log(p) + (1 - outcomes) * math.log(1 - p)).sum(-1).exp()
    gradient_of_groups = (advantages * (outcomes - p)).mean(-1)
    assert float((law * gradient_of_groups).sum()) == pytest.approx((1 - (1 - p) ** (n - 1)) * (1 - p), abs=1e-12)


@pytest.mark.parametrize(("q", "expected"), [(0.1, 0.19596), (0.25, 0.35536), (0.5, 0.43395), (0.9, 0.19596)])
def test_expected_coefficient_of_grpo(q: float, expected: float) -> None:
    """On the success logit, binary reward, groups of 8: exactly by the binomial law, and by Monte Carlo within 1 %."""

    def coefficients(successes: Tensor) -> Tensor:
        groups = len(successes)
        rewards = (torch.arange(8) < successes[:, None]).double()
        ids = torch.arange(groups).repeat_interleave(8)
        advantages = group_baseline("group_norm", rewards.flatten(), ids).rewards.double()
        return (advantages.view(groups, 8) * rewards).mean(1)

    law = torch.tensor([math.comb(8, m) * q**m * (1 - q) ** (8 - m) for m in range(9)], dtype=F64)
    assert float((law * coefficients(torch.arange(9))).sum()) == pytest.approx(expected, abs=1e-5)
    sampled = torch.multinomial(law, 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    assert float(coefficients(sampled).mean()) == pytest.approx(expected, rel=0.01)
