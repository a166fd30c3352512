"""Log-probabilities and entropies of tokens, from logits or, memory-lean, from hidden states and the LM head.

`token_logprobs` never holds the [N, V] logits: forward and backward go over chunks of tokens, and the backward
recomputes a chunk's logits instead of storing them. Softmax in float32 (float64 for float64 inputs) throughout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.core.masks import at_least_fp32

CHUNK_BYTES = 64 * 1024 * 1024
"""Size of one float32 chunk of logits; a few of them live at the same time."""

# Stands in for log 0 next to a probability that is exactly 0: finite, and far below where exp underflows.
_LOG_ZERO = -1e4


def logprobs_from_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at targets. logits [..., V], targets [...] int64; returns [...] float32.

    Raises:
        ValueError: temperature not > 0, or shapes that differ.
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} must agree but for V")
    z = at_least_fp32(logits) / temperature
    return z.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """-sum p log p in nats of p = softmax(logits / temperature). logits [..., V]; returns [...] float32.

    Tokens of probability 0 contribute 0 to the entropy and to its gradient.
    """
    _check_temperature(temperature)
    logp = (at_least_fp32(logits) / temperature).log_softmax(-1)
    return -(logp.exp() * logp.clamp_min(_LOG_ZERO)).sum(-1)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs [N], entropies [N] or None) of softmax((hidden weight^T + bias) / temperature), float32.

    hidden [N, H], weight [V, H], bias [V] in one dtype, targets [N] int64. The product is computed in that dtype, as
    the model's own head would, the softmax in float32 (all in float64 for float64). Gradients flow to hidden, weight
    and bias, whichever require them; the weight's is accumulated in at least float32. Only first derivatives.
    chunk_tokens: tokens per chunk, None for about CHUNK_BYTES of logits; it changes memory, not results.
    Entropy: -sum p log p in nats, where tokens of probability 0 contribute 0.

    Raises:
        ValueError: shapes or dtypes that do not fit, temperature or chunk_tokens not > 0.
    """
    _check_temperature(temperature)
    _check_head(hidden, weight, targets, bias)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    elif chunk_tokens <= 0:
        raise ValueError(f"chunk_tokens must be > 0, got {chunk_tokens!r}")
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, bias, temperature, with_entropy, chunk_tokens)
    return logprobs, entropy if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    """Saves the inputs and two numbers per token (log-sum-exp, entropy); everything else is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        n = len(targets)
        logprobs = at_least_fp32(hidden).new_empty(n)
        lse, entropy = torch.empty_like(logprobs), logprobs.new_empty(n if with_entropy else 0)
        for start in range(0, n, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            z = _logits(hidden[rows], weight, bias, temperature)
            lse[rows] = z.logsumexp(-1)
            logprobs[rows] = z.gather(-1, targets[rows, None]).squeeze(-1) - lse[rows]
            if with_entropy:
                logp = z.sub_(lse[rows, None])
                p = logp.exp()
                entropy[rows] = -p.mul_(logp.clamp_min_(_LOG_ZERO)).sum(-1)
            del z
        ctx.save_for_backward(hidden, weight, targets, bias, lse, entropy)
        ctx.temperature, ctx.with_entropy, ctx.chunk_tokens = temperature, with_entropy, chunk_tokens
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch types the decorator as positional-only)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, targets, bias, lse, entropy = ctx.saved_tensors
        want_hidden, want_weight, _, want_bias = ctx.needs_input_grad[:4]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if want_weight else None
        grad_bias = lse.new_zeros(len(bias)) if want_bias else None
        for start in range(0, len(targets), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            z = _logits(hidden[rows], weight, bias, ctx.temperature)
            h = (grad_entropy[rows], entropy[rows]) if ctx.with_entropy else None
            grad_z = _logits_grad(z, targets[rows], lse[rows], grad_logprobs[rows], h).div_(ctx.temperature)
            del z
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
            grad_z = grad_z.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_z, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_z.t(), hidden[rows])
            del grad_z
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 3,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """A fresh [C, V] tensor of tempered logits in at least float32, free to be overwritten."""
    z = torch.nn.functional.linear(hidden, weight, bias)
    z = at_least_fp32(z)
    return z if temperature == 1.0 else z.div_(temperature)


def _logits_grad(
    z: Tensor, targets: Tensor, lse: Tensor, grad_logprobs: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient with respect to z [C, V], which is overwritten. entropy: (its gradient [C], its value [C]) or None.

    d logp_y / d z_k = 1[k = y] - p_k; d H / d z_k = -p_k (log p_k + H).
    """
    logp = z.sub_(lse[:, None])
    if entropy is None:
        grad = logp.exp_().mul_(-grad_logprobs[:, None])
    else:
        grad_entropy, value = entropy
        grad = logp.exp()
        factor = logp.clamp_min_(_LOG_ZERO).add_(value[:, None]).mul_(-grad_entropy[:, None])
        grad.mul_(factor.sub_(grad_logprobs[:, None]))
    return grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may have a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"--rollout.temperature must be > 0 to score tokens, got {temperature!r}")


def _check_head(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    fits = (
        hidden.ndim == weight.ndim == 2
        and hidden.shape[1] == weight.shape[1]
        and targets.shape == hidden.shape[:1]
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if not fits:
        shapes = [tuple(t.shape) for t in (hidden, weight, targets)]
        raise ValueError(
            f"expected hidden [N, H], weight [V, H], targets [N] and bias [V] or None, got {shapes} "
            f"and {None if bias is None else tuple(bias.shape)}"
        )
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(f"hidden, weight and bias must have one dtype, got {hidden.dtype} and {weight.dtype}")
