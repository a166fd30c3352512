"""Every policy loss: its gradient by hand, its settings, where on-policy training ends, what stale samples cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from openrlhf.core.config import AdvantageConfig, PolicyLossConfig
from openrlhf.core.kl import kl_estimate
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.losses.policy import policy_loss
from openrlhf.core.tables import POLICY_LOSSES
from support.core_helpers import NAN, check, gradient, mask, mean, metric_means, random_inputs, rows, step_mean

F64 = torch.float64
Row = list[float]
every_loss = pytest.mark.parametrize("name", POLICY_LOSSES)

# Bounds that some of the tokens of these tests cross; the published ones are too wide for that.
TIGHT = PolicyLossConfig(
    eps_clip_low_high=(0.2, 0.28), cispo_max_ratio=1.3, sapo_tau=(1.5, 2.5), dppo_tv_delta=0.1, dppo_kl_delta=0.02,
    drpo_delta=0.15, vespo_k=(2.0, 3.0), vespo_lambda=(3.0, 2.0),
)  # fmt: skip


def config(name: str, base: PolicyLossConfig = TIGHT) -> PolicyLossConfig:
    return replace(base, policy_loss_type=name)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clipped(ratio: float, advantage: float) -> bool:
    return ratio > 1.28 if advantage > 0 else ratio < 0.8


def binary_kl(new: float, old: float) -> float:
    p, mu = math.exp(new), math.exp(old)
    return mu * (old - new) + (1 - mu) * (math.log1p(-mu) - math.log1p(-p))


def moves_on(r: float, a: float) -> bool:
    return a * (r - 1) > 0


def kernel(log_w: float, a: float) -> float:
    k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return math.exp(k * log_w + rate * (1 - math.exp(log_w)))


# The weight of a token's A * grad log p, from the papers' gradients: (new, old, advantage) -> weight.
TOKEN: dict[str, Callable[[float, float, float], float]] = {
    "ppo": lambda n, o, a: 0.0 if clipped(math.exp(n - o), a) else math.exp(n - o),
    "cispo": lambda n, o, a: min(math.exp(n - o), 1.3),
    "sapo": lambda n, o, a: (
        4 * sigmoid(t := (1.5 if a > 0 else 2.5) * (math.exp(n - o) - 1)) * (1 - sigmoid(t)) * math.exp(n - o)
    ),
    "dppo_tv": lambda n, o, a: (
        0.0 if moves_on(n - o + 1, a) and abs(math.exp(n) - math.exp(o)) > 0.1 else math.exp(n - o)
    ),
    "dppo_kl": lambda n, o, a: 0.0 if moves_on(n - o + 1, a) and binary_kl(n, o) > 0.02 else math.exp(n - o),
    "drpo": lambda n, o, a: (
        math.exp(n - o) * (1 - math.copysign(1, a * (n - o)) * abs(math.exp(n) - math.exp(o)) / 0.15)
    ),
}


def geometric(new: Row, old: Row) -> float:
    return math.exp(math.fsum(n - o for n, o in zip(new, old, strict=True)) / len(new))


def by_hand(name: str, new: Row, old: Row, adv: Row) -> Row:
    """Gradient of the sum of a sequence's token losses."""
    if name == "gspo":  # every token moves the ratio of all: eq. 10
        s, n = geometric(new, old), len(new)
        return [-math.fsum(0.0 if clipped(s, a) else s * a for a in adv) / n] * n
    if name == "gspo_token":  # eq. 17
        s = geometric(new, old)
        return [0.0 if clipped(s, a) else -s * a for a in adv]
    if name == "vespo":
        log_w = math.fsum(n - o for n, o in zip(new, old, strict=True))
        return [-kernel(log_w, a) * a for a in adv]
    return [-TOKEN[name](n, o, a) * a for n, o, a in zip(new, old, adv, strict=True)]


def inputs(seed: int) -> dict[str, Any]:
    """Of policy_loss, float64: probabilities of all sizes, and one row without a trainable token."""
    g = torch.Generator().manual_seed(seed)
    old = (0.05 + 0.9 * torch.rand(5, 6, generator=g, dtype=F64)).log()
    new = (old + 0.35 * torch.randn(5, 6, generator=g, dtype=F64)).clamp(max=-0.01)
    m = torch.rand(5, 6, generator=g) < 0.7
    m[2] = False
    adv = torch.randn(5, 6, generator=g, dtype=F64)
    return {"logprobs": new.requires_grad_(), "old_logprobs": old, "advantages": adv, "action_mask": m}


@every_loss
@pytest.mark.parametrize("seed", range(20))
def test_gradient_by_hand(name: str, seed: int) -> None:
    given = inputs(seed)
    out = policy_loss(**given, config=config(name))
    found, m = gradient(out.total, given["logprobs"]), given["action_mask"]
    sequences = out.count < float(m.sum())
    for b in range(len(m)):
        new, old, adv = (given[k][b][m[b]].tolist() for k in ("logprobs", "old_logprobs", "advantages"))
        expected = by_hand(name, new, old, adv) if new else []
        check(found[b][m[b]], torch.tensor(expected, dtype=F64) / (len(new) if sequences else 1), 1e-12)
        assert not found[b][~m[b]].any()


def test_the_cases_cross_the_bounds_of_every_loss() -> None:
    """Else the gradients by hand would say nothing about them."""
    for name in POLICY_LOSSES:
        shares = [
            metric_means(policy_loss(**inputs(seed), config=config(name)))["ppo_clip_ratio"] for seed in range(20)
        ]
        assert (max(shares) > 0) is (name not in ("sapo", "vespo")), name


DETACHED = {"gspo_token", "cispo", "vespo"}
"""Losses of which a part is held back from the gradient: the value's derivative is another one, by their papers."""


@every_loss
def test_gradcheck(name: str) -> None:
    given = inputs(3)
    x = given.pop("logprobs")

    def loss(y: Tensor) -> Tensor:
        return policy_loss(logprobs=y, **given, config=config(name)).total

    if name not in DETACHED:
        assert gradcheck(loss, (x,))
        return
    weights = gradient(loss(x), x)  # what is held back stays as it is at x
    assert gradcheck(lambda y: (weights * y).sum(), (x,))
    check(gradient((weights * x).sum(), x), weights, 0)
    assert not gradcheck(loss, (x,), raise_exception=False)


@every_loss
@pytest.mark.parametrize("kind", [None, "tis", "icepop", "seq-mask-tis"])
def test_neither_split_nor_padding_matter(name: str, kind: Any) -> None:
    given = random_inputs(0)
    fix = None if kind is None else AdvantageConfig(is_correction_enable=True, is_correction_type=kind)

    def step(micro: int, pad: int = 0) -> tuple[Tensor, dict[str, float]]:
        padded = {k: torch.nn.functional.pad(v, (0, pad)) for k, v in given.items()}
        x, outs = padded.pop("logprobs").requires_grad_(), []
        for i in torch.arange(len(x)).split(micro):
            part: dict[str, Any] = {k: v[i] for k, v in padded.items()}
            outs.append(policy_loss(logprobs=x[i], **part, config=config(name), correction=fix))
        return gradient(step_mean(outs), x)[:, :7], _means(outs)

    whole, metrics = step(6)
    assert whole.abs().sum() > 0
    for micro, pad in ((1, 0), (2, 5), (4, 0), (6, 40)):
        part, others = step(micro, pad)
        check(part, whole, 1e-6)
        assert others == pytest.approx(metrics, abs=1e-6)


def _means(outs: list[LossOutput]) -> dict[str, float]:
    names = outs[0].metrics
    return {n: sum(float(o.metrics[n][0]) for o in outs) / sum(o.metrics[n][1] for o in outs) for n in names}


@every_loss
def test_what_is_under_the_mask_reaches_nothing(name: str) -> None:
    x = rows([-0.5, NAN, -0.9]).requires_grad_()
    junk = rows([-0.7, NAN, -0.8])
    out = policy_loss(
        logprobs=x, old_logprobs=junk, advantages=rows([1, NAN, -1]), action_mask=mask([1, 0, 1]), config=config(name)
    )
    grad = gradient(out.total, x)
    assert grad.isfinite().all()
    assert float(grad[0, 1]) == 0
    bad = policy_loss(
        logprobs=rows([NAN]), old_logprobs=rows([-1]), advantages=rows([1]), action_mask=mask([1]), config=config(name)
    )
    assert math.isnan(mean(bad))


@every_loss
@pytest.mark.parametrize("new", [-1e4, -1e-12, 0.0])
@pytest.mark.parametrize("old", [-1e4, -1e-12, 0.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_certain_and_impossible_tokens(name: str, new: float, old: float, advantage: float) -> None:
    for dtype in (torch.float32, F64):
        x = rows([new], dtype=dtype).requires_grad_()
        out = policy_loss(
            logprobs=x, old_logprobs=rows([old], dtype=dtype), advantages=rows([advantage], dtype=dtype),
            action_mask=mask([1]), config=config(name),
        )  # fmt: skip
        assert out.total.isfinite()
        assert gradient(out.total, x).isfinite().all()


@every_loss
def test_a_loss_reads_its_settings_and_no_others(name: str) -> None:
    """By the gradient at many points, with another value of one setting at a time."""
    own = {f.name for row in POLICY_LOSSES.values() for f in fields(PolicyLossConfig) if f.name in row.settings.split()}
    assert own == {word for row in POLICY_LOSSES.values() for word in row.settings.split()}
    changed = {
        "eps_clip": 0.05, "eps_clip_low_high": (0.05, 0.07), "dual_clip": 1.01, "cispo_max_ratio": 1.1,
        "sapo_tau": (2.0, 3.0), "dppo_tv_delta": 0.01, "dppo_kl_delta": 0.001, "drpo_delta": 0.05,
        "vespo_k": (1.0, 2.0), "vespo_lambda": (2.0, 1.0),
    }  # fmt: skip
    assert set(changed) == own

    def gradients(options: PolicyLossConfig) -> Tensor:
        given = [inputs(seed) for seed in range(30)]
        return torch.stack([gradient(policy_loss(**x, config=options).total, x["logprobs"]) for x in given])

    base = config(name, replace(TIGHT, eps_clip_low_high=None))
    before = gradients(base)
    read = {key for key, value in changed.items() if not torch.equal(before, gradients(replace(base, **{key: value})))}
    assert read == set(POLICY_LOSSES[name].settings.split())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cispo", {"cispo_max_ratio": 0.0}),
        ("sapo", {"sapo_tau": (1.0, 0.0)}),
        ("dppo_tv", {"dppo_tv_delta": -1.0}),
        ("dppo_kl", {"dppo_kl_delta": 0.0}),
        ("drpo", {"drpo_delta": 0.0}),
        ("vespo", {"vespo_k": (0.0, 1.0)}),
        ("vespo", {"vespo_lambda": (1.0, -1.0)}),
    ],
)
def test_settings_out_of_range(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`.* must be > 0"):
        policy_loss(**inputs(0), config=config(name, replace(TIGHT, **wrong)))


REF = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=F64)
REWARD = torch.tensor([0.0, 0.2, 0.5, 1.0], dtype=F64)
BETA = 0.5
OPTIMUM = torch.softmax(REF.log() + REWARD / BETA, -1)
ONE = torch.ones(4, 1, dtype=torch.bool)


def expected_gradient(name: str, logits: Tensor, old: Tensor, advantages: Tensor, base: PolicyLossConfig) -> Tensor:
    """Of -loss, over the four actions drawn from `old` [4]: exact."""
    logp = logits.log_softmax(-1)
    parts = [
        policy_loss(
            logprobs=logp[a].view(1, 1), old_logprobs=old[a].log().view(1, 1), advantages=advantages[a].view(1, 1),
            action_mask=ONE[:1], config=config(name, base),
        ).total
        for a in range(4)
    ]  # fmt: skip
    return -gradient((old * torch.stack(parts)).sum(), logits)


def regularised(p: Tensor) -> Tensor:
    """Rewards less the KL penalty of each action, centred: zero everywhere at the optimum."""
    reward = REWARD - BETA * kl_estimate(p.log(), REF.log(), "k1")
    return reward - (p * reward).sum()


@every_loss
@pytest.mark.parametrize("inner", [1, 4])
def test_kl_regularised_bandit(name: str, inner: int) -> None:
    """Samples of the policy itself, and samples that are up to four updates old, with the published settings."""
    logits = REF.log().clone().requires_grad_()
    for _ in range(1500):
        old = logits.detach().softmax(-1)
        for _ in range(inner):
            step = expected_gradient(name, logits, old, regularised(old), PolicyLossConfig())
            logits = (logits + 0.5 * step).detach().requires_grad_()
    check(logits.softmax(-1), OPTIMUM, 1e-3)


STALE = torch.tensor([0.62, 0.2, 0.1, 0.08], dtype=F64)
"""What sampled, while the policy is REF: ratios 0.81, 1.5, 1.5, 0.63."""


# The policy gradient with weight w_a in the place of the ratio: what stale samples cost, by the papers' own gradients.
@every_loss
def test_bias_of_stale_samples(name: str) -> None:
    logits = REF.log().requires_grad_()
    advantages = REWARD - (REF * REWARD).sum()
    true = REF * (advantages - (REF * advantages).sum())
    found = expected_gradient(name, logits, STALE, advantages, TIGHT)
    signs = advantages.sign().tolist()
    pairs = zip(REF.log().tolist(), STALE.log().tolist(), signs, strict=True)
    w = torch.tensor([-a * by_hand(name, [new], [old], [a])[0] for new, old, a in pairs], dtype=F64)
    ratio = REF / STALE
    pull = STALE * (w - ratio) * advantages
    bias = pull - REF * pull.sum()
    check(found - true, bias, 1e-12)
    gain = float((found * true).sum() / true.square().sum())
    assert gain == pytest.approx(GAINS[name], abs=5e-4)


GAINS = {
    "ppo": 0.6709,
    "gspo": 0.6709,
    "gspo_token": 0.6709,
    "cispo": 0.9561,
    "sapo": 0.9152,
    "dppo_tv": 0.5792,
    "dppo_kl": 0.5647,
    "drpo": 0.5988,
    "vespo": 0.9946,
}
"""Length of the gradient along the true one, in units of that: 1 is unbiased."""
