"""Distillation: divergences by hand, their gradients, top-k and whole vocabulary, splits, where a student must end."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from openrlhf.core.advantages import compute_advantages
from openrlhf.core.config import Divergence, PolicyLossConfig
from openrlhf.core.losses.distill import (
    DIVERGENCES,
    OutputLayer,
    Teacher,
    TeacherStates,
    TopTokens,
    distill_loss,
    teacher_rewards,
    token_divergence,
    top_tokens,
)
from openrlhf.core.losses.policy import policy_loss
from support.core_helpers import AdamState, adam_step, check, gradient, mask, rows

F64 = torch.float64
GIVEN = OutputLayer(weight=None)
"""Of states that are logits."""
KINDS: tuple[Divergence, ...] = get_args(Divergence)
N, H, V, TEACHER_H = 7, 5, 11, 8


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)) * scale


def teacher_states(vocab: int = V, n: int = N) -> TeacherStates:
    """A larger model: hidden states and output layer of a size of its own."""
    layer = OutputLayer(weight=randn(vocab, TEACHER_H, seed=1), bias=randn(vocab, seed=2))
    return TeacherStates(states=randn(n, TEACHER_H, seed=3), layer=layer)


def tops(whole: TeacherStates, k: int) -> TopTokens:
    return top_tokens(whole.states, whole.layer, k)


def logprobs(whole: TeacherStates) -> Tensor:
    return whole.layer.logits(whole.states).log_softmax(-1)


def by_hand(log_q: Tensor, log_p: Tensor, kind: Divergence, beta: float) -> Tensor:
    """Straight from the definitions, over the last dimension, with autograd's gradient."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if kind == "reverse":
        return kl(log_q, log_p)
    if kind == "forward":
        return kl(log_p, log_q)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def coarse(logp: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the tokens `ids` and of all others together."""
    named = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, True)
    other = torch.where(named, torch.zeros_like(logp), logp.exp()).sum(-1, keepdim=True).log()
    return torch.cat([logp.gather(-1, ids), other], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_definition(kind: Divergence, k: int, temperature: float) -> None:
    whole = teacher_states()
    teacher: Teacher = tops(whole, k) if k else whole
    states, weight, bias = (x.requires_grad_() for x in (randn(N, H, seed=4), randn(V, H, seed=5), randn(V, seed=6)))
    layer = OutputLayer(weight=weight, bias=bias, temperature=temperature)
    g = randn(N, seed=7)
    got = token_divergence(states, layer, teacher, kind, 0.3, chunk_tokens=3)
    log_q, log_p = ((states @ weight.T + bias) / temperature).log_softmax(-1), logprobs(whole)
    if isinstance(teacher, TopTokens):
        log_q, log_p = coarse(log_q, teacher.ids), coarse(log_p, teacher.ids)
    expected = by_hand(log_q, log_p, kind, 0.3)
    check(got, expected, 1e-12)
    for mine, own in zip(
        torch.autograd.grad((got * g).sum(), (states, weight, bias)),
        torch.autograd.grad((expected * g).sum(), (states, weight, bias)),
        strict=True,
    ):
        check(mine, own, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 3, V])
def test_gradcheck(kind: Divergence, k: int) -> None:
    whole = teacher_states()
    teacher: Teacher = tops(whole, k) if k else whole

    def loss(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return token_divergence(states, OutputLayer(weight=weight, bias=bias), teacher, kind)

    inputs = tuple(x.requires_grad_() for x in (randn(N, H, seed=4), randn(V, H, seed=5), randn(V, seed=6)))
    assert gradcheck(loss, inputs)
    logits = randn(N, V, seed=8).requires_grad_()
    assert gradcheck(lambda z: token_divergence(z, GIVEN, teacher, kind), (logits,))


def test_gradients_by_hand() -> None:
    """One place, two tokens, q = 1/4, p = 1/2: dKL(q||p)/dz = q (log q/p - D), dKL(p||q)/dz = q - p."""
    z = torch.tensor([[0.0, 3.0]], dtype=F64).log().clamp_min(-1e9)
    z[0, 0] = 0.0
    teacher = TeacherStates(states=torch.zeros(1, 2, dtype=F64), layer=GIVEN)
    q, half = torch.tensor([0.25, 0.75], dtype=F64), torch.tensor([0.5, 0.5], dtype=F64)
    ratio = (q / half).log()
    expected = {"reverse": q * (ratio - (q * ratio).sum()), "forward": q - half}
    m = (q + half) / 2
    pull = q * (q / m).log() / 2
    expected["jsd"] = pull - q * pull.sum()
    for kind in KINDS:
        x = z.clone().requires_grad_()
        value = token_divergence(x, GIVEN, teacher, kind)
        check(torch.autograd.grad(value.sum(), x)[0][0], expected[kind], 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_top_k_of_the_whole_vocabulary_is_the_whole_divergence(kind: Divergence, dtype: torch.dtype) -> None:
    whole = teacher_states()
    own = TeacherStates(
        states=whole.states.to(dtype),
        layer=OutputLayer(weight=randn(V, TEACHER_H, seed=1).to(dtype), bias=randn(V, seed=2).to(dtype)),
    )
    z = randn(N, V, seed=9, scale=3).to(dtype).requires_grad_()
    layer = GIVEN
    top = tops(own, V)
    assert bool(torch.isneginf(top.rest).all())
    a, b = (token_divergence(z, layer, t, kind) for t in (own, top))
    assert float((a - b).detach().abs().max()) <= 1e-6
    ga, gb = (torch.autograd.grad(x.sum(), z)[0] for x in (a, b))
    assert float((ga - gb).abs().max()) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 2, V])
def test_a_model_learns_nothing_from_itself(kind: Divergence, k: int) -> None:
    whole = teacher_states()
    layer = OutputLayer(weight=whole.layer.weight, bias=whole.layer.bias)
    states = whole.states.clone().requires_grad_()
    value = token_divergence(states, layer, tops(whole, k) if k else whole, kind)
    assert float(value.detach().abs().max()) <= 1e-12
    assert float(torch.autograd.grad(value.sum(), states)[0].abs().max()) <= 1e-7


@given(
    seed=st.integers(0, 10_000), k=st.integers(1, V), kind=st.sampled_from(KINDS), scale=st.sampled_from([0.1, 3, 60])
)
def test_a_top_k_divergence_is_one_and_never_above_the_whole(seed: int, k: int, kind: Divergence, scale: float) -> None:
    """Joining outcomes loses information, and never gains any (data-processing inequality)."""
    z, t = randn(4, V, seed=seed, scale=scale), randn(4, V, seed=seed + 1, scale=scale)
    own = GIVEN
    whole = TeacherStates(states=t, layer=own)
    parts = [token_divergence(z, own, x, kind) for x in (tops(whole, k), whole)]
    assert all(bool(torch.isfinite(x).all()) for x in parts)
    assert float(parts[0].min()) >= -1e-9
    assert bool((parts[0] <= parts[1] + 1e-9 * (1 + parts[1].abs())).all())


def test_jsd_lies_between_the_two() -> None:
    """JSD / beta -> KL(p || q) for beta -> 0, JSD / (1 - beta) -> KL(q || p) for beta -> 1 (GKD, section 2)."""
    whole, z, layer = teacher_states(), randn(N, V, seed=9), GIVEN
    small, large = (token_divergence(z, layer, whole, "jsd", b) for b in (1e-9, 1 - 1e-9))
    check(small / 1e-9, token_divergence(z, layer, whole, "forward"), 1e-4)
    check(large / 1e-9, token_divergence(z, layer, whole, "reverse"), 1e-4)


@pytest.mark.parametrize("k", [0, 3])
def test_models_whose_embeddings_are_padded_differently(k: int) -> None:
    """Only ids that both have take part; the others have no gradient."""
    whole = teacher_states(vocab=V + 3)
    weight, bias = whole.layer.weight, whole.layer.bias
    assert weight is not None
    assert bias is not None
    shared = TeacherStates(states=whole.states, layer=OutputLayer(weight=weight, bias=bias, vocab=V))
    cut = TeacherStates(states=whole.states, layer=OutputLayer(weight=weight[:V], bias=bias[:V]))
    for one, two in ((shared, cut), (tops(shared, 3), tops(cut, 3))):
        a, b = (token_divergence(randn(N, V, seed=9), GIVEN, x, "reverse") for x in (one, two))
        check(a, b, 1e-12)
    own, states = randn(V + 2, H, seed=5).requires_grad_(), randn(N, H, seed=4)
    value = token_divergence(states, OutputLayer(weight=own, vocab=V), tops(shared, k) if k else shared, "forward")
    grad = torch.autograd.grad(value.sum(), own)[0]
    assert bool((grad[V:] == 0).all())
    assert bool((grad[:V] != 0).any())


def test_ids_that_only_the_teacher_has_count_as_any_other_token() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64).log()
    told = TopTokens(ids=torch.tensor([[0, 7]]), logprobs=p[:, :2], rest=p[:, 2])
    z = torch.tensor([[0.5, 0.25, 0.25]], dtype=F64).log().requires_grad_()
    value = token_divergence(z, GIVEN, told, "forward")
    check(value, torch.zeros(1, dtype=F64), 1e-12)
    check(torch.autograd.grad(value.sum(), z)[0], torch.zeros(1, 3, dtype=F64), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_probability_leave_everything_finite(kind: Divergence) -> None:
    layer = OutputLayer(weight=None, suppressed=(1, 4))
    whole = TeacherStates(states=randn(N, V, seed=3), layer=OutputLayer(weight=None, suppressed=(4,)))
    for teacher in (whole, tops(whole, 5), tops(whole, V)):
        z = randn(N, V, seed=9).requires_grad_()
        value = token_divergence(z, layer, teacher, kind)
        grad = torch.autograd.grad(value.sum(), z)[0]
        assert bool(torch.isfinite(value).all() and torch.isfinite(grad).all())
        assert bool((grad[:, 4] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_splits_add_up(kind: Divergence) -> None:
    """Chunks, micro-batches and ranks: sums over their counts are the mean of all."""
    whole = teacher_states(n=12)
    states, weight = randn(12, H, seed=4), randn(V, H, seed=5).requires_grad_()
    layer = OutputLayer(weight=weight)
    shape, m = (3, 4), mask([1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0])

    def total(rows_: slice, chunk: int | None) -> tuple[Tensor, float]:
        part = TeacherStates(states=whole.states.view(*shape, -1)[rows_].flatten(0, 1), layer=whole.layer)
        own = states.view(*shape, -1)[rows_].flatten(0, 1)
        value = token_divergence(own, layer, part, kind, chunk_tokens=chunk)
        out = distill_loss(divergence=value.view(-1, 4), action_mask=m[rows_])
        return out.total, out.count

    once, count = total(slice(0, 3), None)
    parts = [total(slice(i, i + 1), 1) for i in range(3)]
    assert sum(c for _, c in parts) == count == 4
    split = torch.stack([t for t, _ in parts]).sum()
    check(split, once, 1e-12)
    check(torch.autograd.grad(split, weight)[0], torch.autograd.grad(once, weight)[0], 1e-12)


def test_the_logits_of_a_batch_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    logits = OutputLayer.logits

    def counted(self: OutputLayer, states: Tensor) -> Tensor:
        seen.append(len(states))
        return logits(self, states)

    monkeypatch.setattr(OutputLayer, "logits", counted)
    states = randn(N, H, seed=4).requires_grad_()
    token_divergence(
        states, OutputLayer(weight=randn(V, H, seed=5)), teacher_states(), "jsd", chunk_tokens=2
    ).sum().backward()
    assert max(seen) == 2


def test_bad_arguments() -> None:
    z, layer, whole = randn(N, V, seed=9), GIVEN, teacher_states()
    for call, message in (
        (lambda: token_divergence(z, layer, whole, "tv"), r"`distill.divergence` 'tv' is unknown: choose one of rev"),  # pyright: ignore[reportArgumentType]
        (lambda: token_divergence(z, layer, whole, "jsd", 1.0), r"`distill.jsd_beta` must lie in \(0, 1\), got 1.0"),
        (lambda: token_divergence(z[:2], layer, whole, "jsd"), "teacher speaks of 7 places, the student of 2"),
        (lambda: token_divergence(z[:, :4], layer, whole, "jsd"), "teacher has 11 tokens, the student 4"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# -- where a student must end

TEACHER = torch.tensor([[0.6, 0.25, 0.1, 0.05], [0.05, 0.15, 0.2, 0.6], [0.3, 0.3, 0.3, 0.1]], dtype=F64).log()


def learned(grad: Callable[[Tensor], Tensor], steps: int = 400) -> Tensor:
    """A table of next-token logits [context, token] after Adam with a falling rate, from the uniform distribution."""
    x, state = torch.zeros_like(TEACHER).requires_grad_(), AdamState(lr=0.05)
    for i in range(steps):
        state.lr = 0.05 * max(1 - i / steps, 0.01)
        x = adam_step(x, grad(x), state)
    return x.detach()


def kl_to_teacher(student: Tensor) -> float:
    log_q = student.log_softmax(-1)
    return float((log_q.exp() * (log_q - TEACHER)).sum(-1).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 3])
def test_a_tabular_student_reaches_its_teacher(kind: Divergence, k: int) -> None:
    whole = TeacherStates(states=TEACHER, layer=GIVEN)
    teacher: Teacher = tops(whole, k) if k else whole  # with 3 of 4 tokens the fourth is "any other"
    student = learned(lambda x: gradient(token_divergence(x, GIVEN, teacher, kind).sum(), x))
    assert kl_to_teacher(student) <= 1e-3


def distill_advantages(logp: Tensor, teacher: Tensor, m: Tensor, reward: Tensor, reward_coef: float) -> Tensor:
    rewards = teacher_rewards(teacher, logp, m, coef=1.0, reward=reward, reward_coef=reward_coef)
    return compute_advantages("on_policy_distill", rewards, m)[0]


def test_sampled_tokens_lead_there_as_well() -> None:
    """The policy gradient of the log-ratio, in expectation over every context's next tokens."""

    def grad(x: Tensor) -> Tensor:
        logp, m = x.log_softmax(-1), torch.ones(TEACHER.shape, dtype=torch.bool)
        advantages = distill_advantages(logp.detach(), TEACHER, m, torch.zeros(3, dtype=F64), 0.0)
        out = policy_loss(
            logprobs=logp,
            old_logprobs=logp.detach(),
            advantages=advantages * logp.detach().exp(),
            action_mask=m,
            config=PolicyLossConfig(),
        )
        return gradient(out.total, x)

    assert kl_to_teacher(learned(grad)) <= 1e-3
    x = randn(3, 4, seed=11).requires_grad_()  # the same gradient as that of the exact reverse KL
    exact = token_divergence(x, GIVEN, TeacherStates(states=TEACHER, layer=GIVEN), "reverse")
    check(grad(x), gradient(exact.sum(), x), 1e-12)


def test_every_token_keeps_its_own_log_ratio_and_the_reward_reaches_all() -> None:
    m = mask([0, 1, 1, 0], [0, 0, 1, 1])
    teacher, own = rows([9, -1.0, -3.0, 9], [9, 9, -2.0, -0.5]), rows([9, -2.0, -2.0, 5], [9, 9, -2.0, -1.5])
    reward = torch.tensor([2.0, -1.0], dtype=F64)
    check(distill_advantages(own, teacher, m, reward, 0.0), [[0, 1.0, -1.0, 0], [0, 0, 0, 1.0]])
    check(distill_advantages(own, teacher, m, reward, 0.5), [[0, 2.0, 0.0, 0], [0, 0, -0.5, 0.5]])
    halved = teacher_rewards(teacher, own, m, coef=0.5, reward=reward, reward_coef=0.0)
    check(halved, [[0, 0.5, -0.5, 0], [0, 0, 0, 0.5]])


def test_every_divergence_has_a_function() -> None:
    assert set(DIVERGENCES) == set(KINDS)
