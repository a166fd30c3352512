"""Log-probabilities and entropies of tokens, from logits or, memory-lean, from hidden states and the LM head.

Forward and backward go over tiles of tokens x vocabulary (an online softmax, Milakov & Gimelshein, 2018), and the
backward recomputes what it needs of a tile. `token_logprobs` never holds the [N, V] logits (on a CPU a bounded part of
them, for a product costs more there than memory); the functions of given logits never hold a float32 copy of them.
Softmax in float32 (float64 for float64 inputs) throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.core.config import Truncation
from openrlhf.core.masks import at_least_fp32
from openrlhf.core.truncation import KeptTiles, KeptTokens, collect_kept

# Tile sizes (tokens, vocabulary). CPU: 8 MiB of float32, near the caches and below malloc's mmap threshold, so that
# pages are reused. Elsewhere 256 MiB: enough work per kernel.
_CPU_TILE = (512, 4096)
_DEVICE_TILE = (4096, 16384)
# Bytes of logits that are saved for the backward pass on a CPU, which spares a fourth of the head's products: no more
# than the layers of a small model save for as many tokens.
_CPU_SAVED = 512 << 20

# Stands in for log 0 next to a probability that is exactly 0: finite, and far below where exp underflows.
_LOG_ZERO = -1e4


def logprobs_from_logits(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, kept: KeptTokens | None = None
) -> Tensor:
    """log softmax(logits / temperature) at targets. logits [..., V], targets [...] int64; returns [...] float32.

    kept: the softmax is over these tokens alone; -inf for a target outside.

    Raises:
        ValueError: temperature not > 0, or shapes that differ.
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} must agree but for V")
    rows = logits.reshape(-1, logits.shape[-1])
    args = temperature, False, _tile(logits), _tiles(kept)
    return _GivenLogits.apply(rows, targets.reshape(-1), *args)[0].reshape(targets.shape)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0, kept: KeptTokens | None = None) -> Tensor:
    """-sum p log p in nats of p = softmax(logits / temperature). logits [..., V]; returns [...] float32.

    Tokens of probability 0 contribute 0 to the entropy and to its gradient. kept: the others have probability 0.

    Raises:
        ValueError: temperature not > 0.
    """
    _check_temperature(temperature)
    rows = logits.reshape(-1, logits.shape[-1])
    none = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
    args = temperature, True, _tile(logits), _tiles(kept)
    return _GivenLogits.apply(rows, none, *args)[1].reshape(logits.shape[:-1])


@torch.no_grad()
def kept_from_logits(
    logits: Tensor, targets: Tensor, truncation: Truncation, temperature: float = 1.0
) -> tuple[KeptTokens, Tensor]:
    """What truncation keeps of softmax(logits / temperature); see `collect_kept`. logits [N, V], targets [N] int64."""
    _check_temperature(temperature)
    chunks = (_tempered(logits[rows], temperature) for rows in _whole_rows(logits, logits.shape[1]))
    return collect_kept(chunks, targets, truncation)


@torch.no_grad()
def kept_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    truncation: Truncation,
    temperature: float = 1.0,
    bias: Tensor | None = None,
) -> tuple[KeptTokens, Tensor]:
    """The same of softmax((hidden weight^T + bias) / temperature), a tile of whole rows of logits at a time."""
    _check_temperature(temperature)
    _check_head(hidden, weight, targets, bias)
    head = _Head(weight, bias, temperature)
    chunks = (head.logits(hidden, rows, slice(0, len(weight))) for rows in _whole_rows(hidden, len(weight)))
    return collect_kept(chunks, targets, truncation)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(log-probs [N], entropies [N] or None) of softmax((hidden weight^T + bias) / temperature), float32.

    hidden [N, H], weight [V, H], bias [V] in one dtype, targets [N] int64. The product is computed in that dtype, as
    the model's own head would, the softmax in float32 (all in float64 for float64). Gradients flow to hidden, weight
    and bias, whichever require them, accumulated in at least float32. Only first derivatives.
    chunk_tokens, chunk_vocab: size of a tile of logits, by default 512 x 4096 on CPU and 4096 x 16384 elsewhere; they
    change memory and rounding, nothing else. On a CPU up to 512 MiB of logits are saved for the backward pass.
    Entropy: -sum p log p in nats, where tokens of probability 0 contribute 0, also to the gradient.
    kept: the softmax is over these tokens alone; others have probability 0, and no gradient flows to their logits.

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature, chunk_tokens or chunk_vocab not > 0.
    """
    _check_temperature(temperature)
    _check_head(hidden, weight, targets, bias)
    tokens, vocab = _tile(hidden)
    tile = (tokens if chunk_tokens is None else chunk_tokens, vocab if chunk_vocab is None else chunk_vocab)
    if min(tile) <= 0:
        raise ValueError(f"chunk_tokens and chunk_vocab must be > 0, got {tile!r}")
    saved_bytes = _CPU_SAVED if hidden.device.type == "cpu" and torch.is_grad_enabled() else 0
    args = temperature, with_entropy, tile, _tiles(kept), saved_bytes
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, targets, bias, *args)
    return logprobs, entropy if with_entropy else None


def _tile(like: Tensor) -> tuple[int, int]:
    return _CPU_TILE if like.device.type == "cpu" else _DEVICE_TILE


def _tiles(kept: KeptTokens | None) -> KeptTiles | None:
    return None if kept is None else KeptTiles(kept)


def _whole_rows(like: Tensor, vocab: int) -> Iterator[slice]:
    """Chunks of tokens whose whole rows of logits are as large as a tile."""
    tokens, columns = _tile(like)
    return _slices(len(like), max(tokens * columns // vocab, 1))


class _GivenLogits(torch.autograd.Function):
    """Saves the logits, which are there anyway, and two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        tile: tuple[int, int],
        kept: KeptTiles | None,
    ) -> tuple[Tensor, Tensor]:
        state = _OnlineSoftmax(at_least_fp32(logits[:0]), len(targets), with_entropy)
        for rows in _slices(len(targets), tile[0]):
            for columns in _slices(logits.shape[1], tile[1]):
                z = _hide(_tempered(logits[rows, columns], temperature), kept, rows, columns)
                state.add(z, rows, _Targets.of(targets, rows, columns))
        lse, entropy = state.log_sum_exp(), state.entropy()
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.temperature, ctx.with_entropy, ctx.tile, ctx.kept = temperature, with_entropy, tile, kept
        return state.target_logit - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch types the decorator as positional-only)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, targets, lse, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = (g / ctx.temperature for g in grad_outputs)
        grad_logits = torch.empty_like(logits)
        for rows in _slices(len(targets), ctx.tile[0]):
            h = (grad_entropy[rows], entropy[rows]) if ctx.with_entropy else None
            for columns in _slices(logits.shape[1], ctx.tile[1]):
                z = _hide(_tempered(logits[rows, columns], ctx.temperature), ctx.kept, rows, columns)
                inside = _Targets.of(targets, rows, columns)
                grad_logits[rows, columns] = _logits_grad(z, inside, lse[rows], grad_logprobs[rows], h)
        return grad_logits, *[None] * 5


def _hide(logits: Tensor, kept: KeptTiles | None, rows: slice, columns: slice) -> Tensor:
    """The tile, where given without the tokens that are not kept."""
    return logits if kept is None else kept.hide_(logits, rows, columns)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """A copy of a tile of logits in at least float32, divided by the temperature, free to be overwritten."""
    return at_least_fp32(logits) / temperature


class _TokenLogprobs(torch.autograd.Function):
    """Saves the inputs and two numbers per token (log-sum-exp, entropy); everything else is recomputed.

    saved_bytes: the first so many bytes of logits stay as well, each tile until a backward pass has overwritten it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        with_entropy: bool,
        tile: tuple[int, int],
        kept: KeptTiles | None,
        saved_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, bias, temperature, kept)
        ctx.logits = {}
        state = _OnlineSoftmax(at_least_fp32(hidden[:0]), len(targets), with_entropy)
        for columns in _slices(len(weight), tile[1]):
            for rows in _slices(len(targets), tile[0]):
                z = head.logits(hidden, rows, columns)
                if z.nbytes <= saved_bytes:
                    saved_bytes -= z.nbytes
                    ctx.logits[rows.start, columns.start] = z.clone()
                state.add(z, rows, _Targets.of(targets, rows, columns))
        lse = state.log_sum_exp()
        entropy = state.entropy()
        ctx.save_for_backward(hidden, weight, targets, bias, lse, entropy)
        ctx.temperature, ctx.with_entropy, ctx.tile, ctx.kept = temperature, with_entropy, tile, kept
        return state.target_logit - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] (torch types the decorator as positional-only)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, lse, entropy = ctx.saved_tensors
        want_hidden, want_weight, _, want_bias = ctx.needs_input_grad[:4]
        grad_logprobs, grad_entropy = (g / ctx.temperature for g in grad_outputs)
        head = _Head(weight, bias, ctx.temperature, ctx.kept)
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if want_hidden else None
        grad_weight = torch.empty_like(weight) if want_weight else None
        grad_bias = lse.new_zeros(len(weight)) if want_bias else None
        for columns in _slices(len(weight), ctx.tile[1]):
            tile_weight = None
            if grad_weight is not None:  # summed up in its place where that is wide enough
                part = grad_weight[columns]
                tile_weight = part.zero_() if part.dtype == lse.dtype else torch.zeros_like(part, dtype=lse.dtype)
            for rows in _slices(len(targets), ctx.tile[0]):
                z = ctx.logits.pop((rows.start, columns.start), None)
                if z is None:
                    z = head.logits(hidden, rows, columns)
                h = (grad_entropy[rows], entropy[rows]) if ctx.with_entropy else None
                inside = _Targets.of(targets, rows, columns)
                grad_z = _logits_grad(z, inside, lse[rows], grad_logprobs[rows], h)
                if grad_bias is not None:
                    grad_bias[columns] += grad_z.sum(0)
                grad_z = grad_z.to(hidden.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], grad_z, weight[columns])
                if tile_weight is not None:
                    _add_product(tile_weight, grad_z.t(), hidden[rows])
            if grad_weight is not None and tile_weight is not None and grad_weight.dtype != lse.dtype:
                grad_weight[columns] = tile_weight
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


@dataclass(frozen=True)
class _Head:
    """The projection to the vocabulary, where given without what is not kept."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    kept: KeptTiles | None = None

    def logits(self, hidden: Tensor, rows: slice, columns: slice) -> Tensor:
        """A fresh tile of tempered logits in at least float32, free to be overwritten."""
        bias = None if self.bias is None else self.bias[columns]
        z = at_least_fp32(torch.nn.functional.linear(hidden[rows], self.weight[columns], bias))
        return _hide(z if self.temperature == 1.0 else z.div_(self.temperature), self.kept, rows, columns)


@dataclass(frozen=True)
class _Targets:
    """Targets within a tile: column [C, 1], clamped into the tile, and inside [C], False where it was clamped."""

    column: Tensor
    inside: Tensor

    @classmethod
    def of(cls, targets: Tensor, rows: slice, columns: slice) -> _Targets:
        column = targets[rows, None] - columns.start
        clamped = column.clamp(0, columns.stop - columns.start - 1)
        return cls(clamped, (column == clamped).squeeze(-1))


class _OnlineSoftmax:
    """Running maximum m, sum of exp(z - m) and, for the entropy, sum of exp(z - m) (z - m) per token [N]."""

    def __init__(self, like: Tensor, n: int, with_entropy: bool) -> None:
        # A finite start: exp(m_old - m_new) is 0 and not NaN while every logit so far is -inf.
        self.maximum = like.new_full((n,), torch.finfo(like.dtype).min)
        self.sum_exp = like.new_zeros(n)
        self.sum_weighted = like.new_zeros(n if with_entropy else 0)
        self.with_entropy = with_entropy
        self.target_logit = like.new_zeros(n)

    def add(self, z: Tensor, rows: slice, targets: _Targets) -> None:
        """Take in the tile z [C, W] of these rows; z is overwritten."""
        self.target_logit[rows] = torch.where(
            targets.inside, z.gather(1, targets.column).squeeze(1), self.target_logit[rows]
        )
        old = self.maximum[rows]
        new = torch.maximum(old, z.amax(-1))
        shift = old - new
        decay = shift.exp()
        z.sub_(new[:, None])
        if self.with_entropy:
            shifted = z.clamp_min(_LOG_ZERO)
            tile_weighted = shifted.mul_(z.exp_()).sum(-1)
            carried = self.sum_weighted[rows] + self.sum_exp[rows] * shift.clamp_min(_LOG_ZERO)
            self.sum_weighted[rows] = decay * carried + tile_weighted
        else:
            z.exp_()
        self.sum_exp[rows] = decay * self.sum_exp[rows] + z.sum(-1)
        self.maximum[rows] = new

    def log_sum_exp(self) -> Tensor:
        return self.maximum + self.sum_exp.log()

    def entropy(self) -> Tensor:
        """log sum_exp - mean of (z - m), [N], or [0] if it was not asked for."""
        return self.sum_exp.log() - self.sum_weighted / self.sum_exp if self.with_entropy else self.sum_weighted


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _logits_grad(
    z: Tensor, targets: _Targets, lse: Tensor, grad_logprobs: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient with respect to the tile z [C, W], which is overwritten. entropy: (its gradient, its value) or None.

    d log p_y / d z_k = 1[k = y] - p_k; d H / d z_k = -p_k (log p_k + H).
    """
    logp = z.sub_(lse[:, None])
    if entropy is None:
        grad = logp.exp_().mul_(-grad_logprobs[:, None])
    else:
        grad_entropy, value = entropy
        grad = logp.exp()
        factor = logp.clamp_min_(_LOG_ZERO).add_(value[:, None]).mul_(-grad_entropy[:, None])
        grad.mul_(factor.sub_(grad_logprobs[:, None]))
    at_target = torch.where(targets.inside, grad_logprobs, torch.zeros_like(grad_logprobs))
    return grad.scatter_add_(1, targets.column, at_target[:, None])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may have a wider dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"`temperature` must be > 0 to score tokens, got {temperature!r}")


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
