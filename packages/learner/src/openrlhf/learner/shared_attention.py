"""Attention over a row of tokens in which samples share their beginnings (`sharing.SharedLayout`).

Two ways to the same numbers. On grids: a block's prefixes are attended to as ordinary causal rows, its tails as rows
whose keys are their prefix's and their own, by torch's scaled dot product attention; nothing is larger than the samples
are. By flex attention (Dong et al., 2024): one kernel over the row with a block mask, for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.learner.sharing import Block, Grid, SharedLayout

HEARD = frozenset({"dropout", "sliding_window", "is_causal", "position_ids", "cache_position", "output_router_logits"})
"""Options of a layer that are followed, or that have done their work before the attention."""


class UnknownOptionError(ValueError):
    """A layer asks for something between scores and softmax that is not known here (a cap, sinks, a bias)."""


def follow(options: dict[str, Any]) -> int | None:
    """The sliding window that a layer asks for; None for all tokens.

    Raises UnknownOptionError for what would be ignored.
    """
    odd = {name for name, value in options.items() if name not in HEARD and value is not None and value is not False}
    if options.get("dropout"):
        odd.add("dropout")
    if options.get("is_causal") is False:
        odd.add("is_causal")
    if odd:
        raise UnknownOptionError(f"its attention takes {', '.join(sorted(odd))}")
    return options.get("sliding_window")


class SharedAttention:
    """An `Attend` for one micro-batch."""

    def __init__(self, layout: SharedLayout, *, flex: bool) -> None:
        self.layout = layout
        self._by = _by_flex if flex else _by_grids

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
        return self._by(self.layout, query, key, value, scaling, follow(options))


# -- on grids


class _Unpad(torch.autograd.Function):
    """Rows of a padded grid -> those of its tokens. Every row is read once at most, so the backward pass writes."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.rows = len(grid)
        return grid.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slots,), (grad,) = ctx.saved_tensors, grads
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy(0, slots, grad), None


def _pad(grid: Grid, tokens: Tensor) -> Tensor:
    """[tokens, H, D] -> [N, H, width, D]."""
    shape = (len(grid.lengths), grid.width, *tokens.shape[1:])
    if grid.slots is not None:
        tokens = tokens.new_zeros(shape[0] * shape[1], *shape[2:]).index_copy(0, grid.slots, tokens)
    return tokens.reshape(shape).transpose(1, 2)


def _unpad(grid: Grid, rows: Tensor) -> Tensor:
    """[N, H, width, D] -> [tokens, H, D]."""
    flat = rows.transpose(1, 2).flatten(0, 1)
    return flat if grid.slots is None else _Unpad.apply(flat, grid.slots)


def _by_grids(
    layout: SharedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    sizes = [n for block in layout.blocks for n in (block.prefixes.tokens, block.tails.tokens if block.tails else 0)]
    parts = [tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value)]
    found = []
    for number, block in enumerate(layout.blocks):
        q, k, v = (_pad(block.prefixes, part[2 * number]) for part in parts)
        masks = _grid_masks(layout, number, window, query)
        found.append(_unpad(block.prefixes, _dot_product(q, k, v, masks[0], scaling)))
        if block.tails is None:
            continue
        tail_q, *tail_kv = (_pad(block.tails, part[2 * number + 1]) for part in parts)
        k, v = (torch.cat([_of_tails(block, p), t], dim=2) for p, t in zip((k, v), tail_kv, strict=True))
        found.append(_unpad(block.tails, _dot_product(tail_q, k, v, masks[1], scaling)))
    return torch.cat(found)[None]


def _of_tails(block: Block, prefixes: Tensor) -> Tensor:
    """[prefixes, H, P, D] -> [tails, H, P, D]."""
    assert block.tails is not None
    if block.owner is None:
        return prefixes.expand(len(block.tails.lengths), -1, -1, -1)
    return prefixes.index_select(0, block.owner)


def _dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Causal without a mask. Only the CPU's kernel reads grouped keys under a mask without a copy for every head."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu":
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        grouped = False
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _grid_masks(layout: SharedLayout, number: int, window: int | None, like: Tensor) -> tuple[Tensor | None, ...]:
    """What prefixes and tails of a block may not see, as numbers to add to the scores; made once for all layers."""
    name = (number, window, like.dtype)
    if name not in layout.masks:
        block = layout.blocks[number]
        seen = _prefixes_see(block, window), _tails_see(block, window)
        layout.masks[name] = tuple(
            None if s is None else torch.zeros(s.shape, dtype=like.dtype).masked_fill_(~s, -torch.inf).to(like.device)
            for s in seen
        )
    masks: Any = layout.masks[name]
    return masks


def _prefixes_see(block: Block, window: int | None) -> Tensor | None:
    """[P, P] bool; None: all before them."""
    if window is None or window >= block.prefixes.width:
        return None
    place = torch.arange(block.prefixes.width)
    return _near(place[:, None], place, window)


def _tails_see(block: Block, window: int | None) -> Tensor | None:
    """[A, P + A] bool where all prefixes are equally long, else [tails, 1, A, P + A]; None without tails."""
    if block.tails is None:
        return None
    width, lengths = block.prefixes.width, torch.tensor(block.prefixes.lengths)
    if bool((lengths == width).all()):
        lengths = lengths[:1]
    elif block.owner is not None:
        lengths = lengths[block.owner.cpu()]
    lengths = lengths[:, None, None, None]
    place = torch.arange(block.tails.width)
    column = torch.arange(width).expand(len(lengths), 1, 1, -1)
    keys = torch.cat([column, lengths + place], dim=-1)
    real = torch.cat([column < lengths, torch.ones_like(lengths + place, dtype=torch.bool)], dim=-1)
    seen = real & _near(lengths + place[:, None], keys, window)
    return seen[0, 0] if len(seen) == 1 else seen


def _near(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Whether positions `key` are seen from `query`: not later, and within the sliding window (transformers' count)."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


# -- by flex attention


def flex_available() -> bool:
    """Whether this torch has flex attention."""
    from transformers.utils.import_utils import is_torch_flex_attn_available

    return is_torch_flex_attn_available()


def _by_flex(
    layout: SharedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    heads = query.shape[1]
    grouped = heads != key.shape[1]
    if grouped and heads & (heads - 1):  # the kernel reads grouped keys for powers of two only
        key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
        grouped = False
    out = compile_friendly_flex_attention(
        query, key, value, training=True, block_mask=_block_mask(layout, window), scale=scaling, enable_gqa=grouped
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def _block_mask(layout: SharedLayout, window: int | None) -> Any:
    """The block mask of the whole row; made once for all layers with the same window."""
    name = ("flex", window)
    if name not in layout.masks:
        from torch.nn.attention.flex_attention import create_block_mask

        device = layout.cells.device
        size = len(layout.cells)
        layout.masks[name] = create_block_mask(
            sees(layout, window), None, None, size, size, device=device, _compile=device.type == "cuda"
        )
    return layout.masks[name]


def sees(layout: SharedLayout, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether the token at place `query` of the row sees that at `key`, in the form that flex attention asks for."""
    family, tail, positions = layout.family, layout.tail, layout.positions

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (tail[key] == 0) | (tail[key] == tail[query])
        return (family[query] == family[key]) & own & _near(positions[query], positions[key], window)

    return mask
