"""Attention over a row of tokens that is cut over the ranks of a group, in one of two ways.

By heads, where the group divides the key heads (Ulysses; Jacobs et al., 2023): an all-to-all turns this rank's tokens
with all heads into all tokens with this rank's heads, another one turns the result back. A rank sends
(N - 1) / N of 2 H + 2 K heads per token of its own and pass, and nothing is computed twice.

By tokens: keys and values of all tokens are gathered (Llama 3; Dubey et al., 2024, section 3.3.2) and dropped again,
which the backward pass repeats to reduce and scatter their gradients: N - 1 times 2 K heads per token of its own, three
times over, and attention is computed once more. Needs no divisible heads.

Either goes over `head_stride` key heads of a rank at a time, so that the whole row is never there with all heads.
DeepSpeed's Ulysses is not used: with sdpa it attends over the borders of packed samples, and it replaces the attention
of every model in the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.learner.sequence_parallel.group import SequenceGroup
from openrlhf.learner.sequence_parallel.slicing import Slices, Span
from openrlhf.learner.shared_attention import follow

QUERY_BLOCK = 1024
"""Rows of a mask that are made at a time, where torch has no causal kernel for fewer queries than keys."""


@dataclass(frozen=True, kw_only=True)
class SequenceParallel:
    """How the rows of a model are cut. implementation: transformers' name of the kernel; head_stride: see above."""

    group: SequenceGroup
    implementation: str
    head_stride: int


class SequenceAttention:
    """An `Attend` for one micro-batch."""

    def __init__(self, slices: Slices, how: SequenceParallel) -> None:
        self.slices = slices
        self.head_stride = how.head_stride
        self.flash = how.implementation if "flash" in how.implementation else None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *,
        scaling: float | None,
        **options: Any,
    ) -> Tensor:
        kernel = Kernel(scaling, follow(options), self.flash)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [S, H, D]
        if by_heads(k.shape[1], self.slices.group.size):
            return self._by_heads(kernel, q, k, v)[None]
        return _ByTokens.apply(q, k, v, self.slices, kernel, self.head_stride)[None]

    def _by_heads(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks, shares = self.slices.group.size, self.slices.tokens(q.device)
        heads = k.shape[1] // ranks
        # head h of the model is head h % heads of rank h // heads, with its queries: [S, ranks, heads, queries, D]
        q, k, v = (t.reshape(len(t), ranks, heads, t.shape[1] // k.shape[1], t.shape[2]) for t in (q, k, v))
        found = []
        for start in range(0, heads, self.head_stride):
            parts = [t[:, :, start : start + self.head_stride].flatten(2, 3) for t in (q, k, v)]
            whole = [self._to_heads(part, shares.order) for part in parts]
            out = kernel(self.slices.whole_span, *whole)
            found.append(self._to_tokens(out, shares.back).unflatten(2, (-1, q.shape[3])))
        return torch.cat(found, dim=2).flatten(1, 3)

    def _to_heads(self, part: Tensor, order: Tensor) -> Tensor:
        """[S, ranks, h, D] -> [T, h, D]."""
        return self.slices.group.exchange(part.transpose(0, 1)).flatten(0, 1).index_select(0, order)

    def _to_tokens(self, out: Tensor, back: Tensor) -> Tensor:
        """[T, h, D] -> [S, ranks, h, D]."""
        parts = out.index_select(0, back).unflatten(0, (self.slices.group.size, -1))
        return self.slices.group.exchange(parts).transpose(0, 1)


def by_heads(key_heads: int, ranks: int) -> bool:
    """Whether heads are exchanged for tokens; else keys and values are gathered."""
    return key_heads % ranks == 0


class _ByTokens(torch.autograd.Function):
    """Saves this rank's queries, keys and values; those of the other ranks come again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slices: Slices, kernel: Kernel, head_stride: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.slices, ctx.kernel, ctx.head_stride = slices, kernel, head_stride
        found = [_attend(slices, kernel, q[:, own], *whole) for own, whole in _passes(q, k, v, slices, head_stride)]
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        slices: Slices = ctx.slices
        found: list[list[Tensor]] = []
        for own, whole in _passes(q, k, v, slices, ctx.head_stride):
            inputs = [t.detach().requires_grad_() for t in (q[:, own], *whole)]
            with torch.enable_grad():
                out = _attend(slices, ctx.kernel, *inputs)
            grad_q, *of_whole = torch.autograd.grad(out, inputs, grads[0][:, own])
            joined = torch.cat(of_whole, dim=-1).index_select(0, slices.tokens(q.device).back)
            widths = [t.shape[-1] for t in of_whole]
            found.append([grad_q, *slices.group.reduce_scatter(joined).split(widths, dim=-1)])
        grad = [torch.cat(parts, dim=1) for parts in zip(*found, strict=True)]
        return *grad, None, None, None


def _passes(
    q: Tensor, k: Tensor, v: Tensor, slices: Slices, head_stride: int
) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Some heads at a time: which of the queries, and keys and values of the whole row."""
    queries, order = q.shape[1] // k.shape[1], slices.tokens(q.device).order
    for start in range(0, k.shape[1], head_stride):
        heads = slice(start, start + head_stride)
        whole = slices.group.all_gather(torch.cat([k[:, heads], v[:, heads]], dim=-1)).index_select(0, order)
        own = slice(start * queries, min(start + head_stride, k.shape[1]) * queries)
        yield own, whole.split([k.shape[-1], v.shape[-1]], dim=-1)


def _attend(slices: Slices, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This rank's queries over keys and values of the whole row."""
    parts = [(span, slice(*span.queries), slice(*span.keys)) for span in slices.spans]
    return torch.cat([kernel(span, q[queries], k[keys], v[keys]) for span, queries, keys in parts])


class Kernel:
    """Attention of packed pieces on one rank: varlen flash attention, else torch's scaled dot product.

    window: how many tokens a token sees, itself among them; None: all before it. flash: transformers' name of a flash
    attention.
    """

    def __init__(self, scaling: float | None, window: int | None, flash: str | None) -> None:
        self.scaling, self.window, self.flash = scaling, window, flash

    def __call__(self, span: Span, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [Q, H, D], key and value [K, H_kv, D] of the span -> [Q, H, D]."""
        if self.flash is not None:
            return self._by_flash(span, query, key, value)
        query_pieces, key_pieces = (_lengths(bounds) for bounds in (span.query_bounds, span.key_bounds))
        pieces = [query.split(query_pieces), *(t.split(key_pieces) for t in (key, value))]
        return torch.cat([part for q, k, v in zip(*pieces, strict=True) for part in self._piece(q, k, v)])

    def _by_flash(self, span: Span, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from transformers.modeling_flash_attention_utils import _flash_attention_forward

        bounds = span.query_bounds, span.key_bounds
        on_device = [torch.tensor(b, dtype=torch.int32, device=query.device) for b in bounds]
        out = _flash_attention_forward(
            query[None],
            key[None],
            value[None],
            attention_mask=None,
            query_length=len(query),
            is_causal=True,  # its mask is aligned to the last key where there are more keys than queries
            softmax_scale=self.scaling,
            sliding_window=self.window,
            cu_seq_lens_q=on_device[0],  # pyright: ignore[reportArgumentType] (it says int64, the kernels want int32)
            cu_seq_lens_k=on_device[1],  # pyright: ignore[reportArgumentType]
            max_length_q=max(_lengths(span.query_bounds)),
            max_length_k=max(_lengths(span.key_bounds)),
            attn_implementation=self.flash,
        )
        return out[0]

    def _piece(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """The last of the keys belong to the queries."""
        before = len(key) - len(query)
        if before == 0 and (self.window is None or self.window >= len(key)):
            yield self._dot_product(query, key, value, None)
            return
        for start in range(0, len(query), QUERY_BLOCK):
            block = query[start : start + QUERY_BLOCK]
            end = before + start + len(block)
            first = 0 if self.window is None else max(before + start - self.window + 1, 0)
            places = torch.arange(first, end, device=query.device)
            rows = torch.arange(before + start, end, device=query.device)[:, None]
            seen = places <= rows
            if self.window is not None:
                seen &= places > rows - self.window
            yield self._dot_product(block, key[first:end], value[first:end], seen)

    def _dot_product(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)


def _lengths(bounds: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(bounds)]
