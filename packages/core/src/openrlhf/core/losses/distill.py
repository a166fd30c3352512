"""Divergences between a teacher's and a student's next-token distributions, over the vocabulary or a teacher's top k.

Sources: the divergences on a student's own samples, R. Agarwal et al., "On-Policy Distillation of Language Models"
(GKD, 2023); reverse KL, Y. Gu et al., "MiniLLM" (2023); the log-ratio of sampled tokens as a reward without discount,
K. Lu et al. (Thinking Machines Lab), "On-Policy Distillation" (2025). Gradients are closed forms, and logits live for a
few tokens at a time: forward and backward go over chunks of tokens, and the backward recomputes a chunk's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.core.config import Divergence
from openrlhf.core.losses.output import LossOutput
from openrlhf.core.masks import at_least_fp32, check_rows, masked_sum, select

LOG_ZERO = -1e4
"""Stands in for the log of a probability of exactly 0: a divergence stays finite where only one side knows a token."""

_CPU_CHUNK, _DEVICE_CHUNK = 1 << 21, 1 << 25
"""Logits of a chunk: 8 MiB of float32 on CPU, elsewhere 128 MiB, of which about six live at a time."""


@dataclass(frozen=True, kw_only=True)
class OutputLayer:
    """What makes a distribution of states: softmax((states weight^T + bias) / temperature) over the first ids.

    weight [V, H], bias [V] or None; weight None: the states are logits [N, V] already. vocab: how many ids take part,
    the first ones (None: all); two models with one tokenizer may have embeddings padded to different sizes.
    suppressed: token ids without probability.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    temperature: float = 1.0
    vocab: int | None = None
    suppressed: tuple[int, ...] = ()

    def width(self, states: Tensor) -> int:
        """How many tokens the distribution is over."""
        size = states.shape[-1] if self.weight is None else len(self.weight)
        return size if self.vocab is None else min(self.vocab, size)

    def logits(self, states: Tensor) -> Tensor:
        """[C, V] in at least float32, of a chunk of states [C, H]; computed in the dtype of the weight."""
        width = self.width(states)
        if self.weight is None:
            z = at_least_fp32(states[:, :width])
        else:
            bias = None if self.bias is None else self.bias[:width]
            z = at_least_fp32(torch.nn.functional.linear(states, self.weight[:width], bias))
        z = z / self.temperature
        if self.suppressed:
            ids = [i for i in self.suppressed if i < width]
            z = z.index_fill(-1, torch.tensor(ids, dtype=torch.long, device=z.device), float("-inf"))
        return z


@dataclass(frozen=True, kw_only=True)
class TopTokens:
    """A teacher's k most probable tokens at N places. ids [N, k] int64, logprobs [N, k], rest [N].

    rest: log of the probability of all other tokens together, -inf where there are none.
    """

    ids: Tensor
    logprobs: Tensor
    rest: Tensor


@dataclass(frozen=True, kw_only=True)
class TeacherStates:
    """A teacher's last hidden states [N, H] and its output layer, from which its whole distribution follows."""

    states: Tensor
    layer: OutputLayer


Teacher = TopTokens | TeacherStates


@torch.no_grad()
def top_tokens(states: Tensor, layer: OutputLayer, k: int, chunk_tokens: int | None = None) -> TopTokens:
    """The k most probable tokens of every distribution; k at most their number. states [N, H] (or logits [N, V])."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in _chunks(states, layer.width(states), chunk_tokens):
        logp = layer.logits(states[rows]).log_softmax(-1)
        top = logp.topk(min(k, logp.shape[-1]), dim=-1)
        rest = logp.scatter(-1, top.indices, float("-inf")).logsumexp(-1)
        found.append((top.indices, top.values, rest))
    ids, logprobs, rest = (torch.cat(parts) for parts in zip(*found, strict=True))
    return TopTokens(ids=ids, logprobs=logprobs, rest=rest)


def token_divergence(
    states: Tensor,
    layer: OutputLayer,
    teacher: Teacher,
    kind: Divergence,
    beta: float = 0.5,
    chunk_tokens: int | None = None,
) -> Tensor:
    """The divergence at every place, [N] in at least float32; p is the teacher's distribution, q the student's.

    reverse: KL(q || p), mode-seeking. forward: KL(p || q), mass-covering. jsd: beta KL(p || m) + (1 - beta) KL(q || m)
    with m = beta p + (1 - beta) q, between the two (Agarwal et al., 2023, eq. 1).
    With `TopTokens` both distributions are those over the k tokens and one outcome "any other token": a divergence of
    distributions still (0 exactly where those probabilities agree), never above the whole one, and it for k = V.
    Truncated sums over the k tokens alone are none: they turn negative and reward probability outside of the k.

    states [N, H] of the student (or logits [N, V]). Gradients flow to states, weight and bias of `layer`, not to the
    teacher. chunk_tokens: places whose logits exist at a time; changes memory and rounding, nothing else.

    Raises:
        ValueError: an unknown divergence, beta outside (0, 1), a teacher of other places or, whole, other ids.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"`distill.divergence` {kind!r} is unknown: choose one of {', '.join(DIVERGENCES)}")
    if not 0 < beta < 1:
        raise ValueError(f"`distill.jsd_beta` must lie in (0, 1), got {beta!r}")
    places = len(teacher.ids if isinstance(teacher, TopTokens) else teacher.states)
    if places != len(states):
        raise ValueError(f"the teacher speaks of {places} places, the student of {len(states)}")
    width = layer.width(states)
    if isinstance(teacher, TeacherStates) and teacher.layer.width(teacher.states) != width:
        raise ValueError(f"the teacher has {teacher.layer.width(teacher.states)} tokens, the student {width}")
    return _TokenDivergence.apply(states, layer.weight, layer.bias, layer, teacher, (kind, beta), chunk_tokens)


def teacher_rewards(
    teacher_logprobs: Tensor, logprobs: Tensor, action_mask: Tensor, *, coef: float, reward: Tensor, reward_coef: float
) -> Tensor:
    """coef (log p_teacher - log p_student) of each sampled token, plus reward_coef times the sample's reward; [B, T].

    All [B, T] but reward [B], without gradient; 0 off the mask. As advantages with no sum over later tokens the first
    part follows the gradient of the reverse KL at every place (Lu et al., 2025); the reward reaches all tokens of its
    sample, since each of them has its part in it.
    """
    check_rows(action_mask, teacher_logprobs=teacher_logprobs, logprobs=logprobs)
    own = coef * (at_least_fp32(teacher_logprobs) - at_least_fp32(logprobs))
    return select((own + reward_coef * reward.to(own.dtype).unsqueeze(-1)).detach(), action_mask)


def distill_loss(*, divergence: Tensor, action_mask: Tensor) -> LossOutput:
    """Sum of divergence [B, T] over trainable tokens, counted in tokens. Metric: distill_loss, its mean per token."""
    check_rows(action_mask, divergence=divergence)
    total, count = masked_sum(divergence, action_mask), float(action_mask.sum())
    return LossOutput(total=total, count=count, metrics={"distill_loss": (total.detach(), count)})


def _reverse(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    pull = _times(log_q.exp(), log_q - log_p)
    return pull.sum(-1), pull


def _forward(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return _times(p, log_p - log_q).sum(-1), -p


def _jsd(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    weights = torch.tensor([beta, 1 - beta], dtype=log_q.dtype, device=log_q.device).log()
    log_m = torch.logaddexp(log_p + weights[0], log_q + weights[1])
    pull = (1 - beta) * _times(log_q.exp(), log_q - log_m)
    return beta * _times(log_p.exp(), log_p - log_m).sum(-1) + pull.sum(-1), pull


DIVERGENCES: dict[Divergence, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "reverse": _reverse,
    "forward": _forward,
    "jsd": _jsd,
}
"""(log q, log p, both [C, K]; beta) -> the divergence [C], and q times its derivative with respect to q [C, K].

The derivative up to a constant, which the normalisation of q takes out: dD / dz = pull - q sum(pull) of its logits z.
"""


def _times(probability: Tensor, factor: Tensor) -> Tensor:
    """Their product, 0 where the probability is 0 whatever the factor."""
    return torch.where(probability > 0, probability * factor, torch.zeros_like(factor))


class _TokenDivergence(torch.autograd.Function):
    """Saves its inputs; everything else is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: OutputLayer,
        teacher: Teacher,
        how: tuple[Divergence, float],
        chunk_tokens: int | None,
    ) -> Tensor:
        ctx.save_for_backward(states, weight, bias)
        ctx.layer, ctx.teacher, ctx.how, ctx.chunk_tokens = layer, teacher, how, chunk_tokens
        values = at_least_fp32(states[:0]).new_zeros(len(states))
        for rows in _chunks(states, layer.width(states), chunk_tokens):
            values[rows] = _compare(layer.logits(states[rows]), teacher, rows, how, with_gradient=False)[0]
        return values

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch types the decorator as positional-only)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        width, wide = layer.width(states), grad_outputs[0].dtype
        grad_states = torch.zeros_like(states)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None
        for rows in _chunks(states, width, ctx.chunk_tokens):
            gradient = _compare(layer.logits(states[rows]), ctx.teacher, rows, ctx.how, with_gradient=True)[1]
            gradient = gradient.mul_(grad_outputs[0][rows, None] / layer.temperature)
            if grad_bias is not None:
                grad_bias[:width] += gradient.sum(0)
            gradient = gradient.to(states.dtype)
            if weight is None:
                grad_states[rows, :width] = gradient
                continue
            grad_states[rows] = gradient @ weight[:width]
            if grad_weight is not None:
                grad_weight[:width] += gradient.t() @ states[rows]
        return (
            grad_states,
            None if weight is None or grad_weight is None else grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


def _compare(
    z: Tensor, teacher: Teacher, rows: slice, how: tuple[Divergence, float], *, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """The divergence [C] of a chunk with the student's logits z [C, V], and its gradient [C, V] with respect to z."""
    kind, beta = how
    log_q = z.log_softmax(-1)
    if isinstance(teacher, TeacherStates):
        log_p = teacher.layer.logits(teacher.states[rows]).log_softmax(-1).to(z.dtype)
        value, pull = DIVERGENCES[kind](log_q.clamp_min(LOG_ZERO), log_p.clamp_min(LOG_ZERO), beta)
        return value, pull.sub_(log_q.exp_().mul_(pull.sum(-1, keepdim=True))) if with_gradient else pull
    ids, width = teacher.ids[rows], z.shape[-1]
    known = ids < width  # a teacher with more embeddings: what only it has counts as "any other token"
    ids = ids.clamp_max(width - 1)
    told = teacher.logprobs[rows].to(z.dtype)
    rest = torch.cat([teacher.rest[rows].to(z.dtype)[:, None], told.masked_fill(known, float("-inf"))], -1)
    log_p = torch.cat([told.masked_fill(~known, float("-inf")), rest.logsumexp(-1, keepdim=True)], -1)
    named = torch.zeros_like(z, dtype=torch.bool).scatter(-1, ids, known)
    others = log_q.masked_fill(named, float("-inf"))
    other = others.logsumexp(-1, keepdim=True)
    own = torch.cat([log_q.gather(-1, ids).masked_fill(~known, float("-inf")), other], -1)
    value, pull = DIVERGENCES[kind](own.clamp_min(LOG_ZERO), log_p.clamp_min(LOG_ZERO), beta)
    if not with_gradient:
        return value, pull
    # the outcome "any other token" hands its pull to its tokens in the proportion of their probabilities
    gradient = torch.where(named, 0.0, (others - other.clamp_min(LOG_ZERO)).exp_().mul_(pull[:, -1:]))
    gradient = gradient.scatter_add(-1, ids, pull[:, :-1].masked_fill(~known, 0.0))
    return value, gradient.sub_(log_q.exp_().mul_(pull.sum(-1, keepdim=True)))


def _chunks(states: Tensor, vocab: int, chunk_tokens: int | None) -> Iterator[slice]:
    size = chunk_tokens or max(1, (_CPU_CHUNK if states.device.type == "cpu" else _DEVICE_CHUNK) // vocab)
    return (slice(start, min(start + size, len(states))) for start in range(0, len(states), size))
