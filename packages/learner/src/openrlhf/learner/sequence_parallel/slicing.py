"""Which rank of a group has which tokens of a packed row, and how what ranks find becomes that of the whole row.

The row is cut into 2 N chunks for N ranks. Rank r has chunks r and 2 N - 1 - r (zig-zag): under a causal mask a late
token has more to attend to than an early one, and so every rank has the same work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from openrlhf.learner.sequence_parallel.group import SequenceGroup


class Shares:
    """Things in a row, each of which one rank of the group has.

    owner: [N] int64, the rank of each. mine: [n] int64, places of this rank's, ascending. within: [N] int64, the place
    of each among its rank's. order: [N] int64, the place of each where all ranks' lie one after the other, padded to
    the most that one has.
    """

    def __init__(self, owner: Tensor, group: SequenceGroup) -> None:
        self.group = group
        self.mine = (owner == group.rank).nonzero()[:, 0]
        counts = torch.bincount(owner, minlength=group.size)
        self._width = int(counts.max())
        place = owner.argsort(stable=True)
        before = (counts.cumsum(0) - counts)[owner[place]]
        self.within = torch.empty_like(owner)
        self.within[place] = torch.arange(len(owner), device=owner.device) - before
        self.order = owner * self._width + self.within

    @cached_property
    def back(self) -> Tensor:
        """The inverse of `order`, for things of which every rank has as many."""
        return self.order.argsort()

    def join(self, own: Tensor) -> Tensor:
        """[n, ...] of this rank -> [N, ...] of all, in order of the row.

        Differentiable for a loss that every rank computes alike from the whole: a rank's gradient is that of its own.
        """
        return _Join.apply(own, self)

    def gather(self, own: Tensor) -> Tensor:
        """The same without gradient."""
        padded = own.new_zeros(self._width, *own.shape[1:])
        padded[: len(own)] = own
        return self.group.all_gather(padded).index_select(0, self.order)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        return shares.gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.shares.mine), None


@dataclass(frozen=True)
class Span:
    """One causal attention of packed pieces: piece i has the last of its keys in common with its queries.

    queries: start and end among this rank's tokens; keys: the same in the whole row. query_bounds, key_bounds: where
    pieces begin and end, counted from there.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    query_bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """How a packed row lies over the ranks of a group.

    bounds: where samples begin in the row, and its end; filling that makes it divisible is the last sample.
    cache: what attention makes once for all layers.
    """

    group: SequenceGroup
    bounds: tuple[int, ...]
    cache: dict[object, Any] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(position_ids: Tensor, group: SequenceGroup) -> Slices:
        """Of a row [1, L] whose position ids begin at 0 with every sample."""
        assert len(position_ids) == 1, "only a packed row is cut"
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        length = position_ids.shape[1]
        assert starts[0] == 0, "a row begins with a sample"
        whole = -(-length // (2 * group.size)) * 2 * group.size
        return Slices(group=group, bounds=tuple(dict.fromkeys((*starts, length, whole))))

    @property
    def length(self) -> int:
        """Tokens of the row with its filling."""
        return self.bounds[-1]

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.length // (2 * self.group.size)

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Start and end of this rank's two chunks in the row."""
        numbers = self.group.rank, 2 * self.group.size - 1 - self.group.rank
        return tuple((n * self.chunk, (n + 1) * self.chunk) for n in numbers)

    def owner(self, places: Tensor) -> Tensor:
        """The rank that has each of these places of the row."""
        number = places // self.chunk
        return torch.minimum(number, 2 * self.group.size - 1 - number)

    def tokens(self, device: torch.device) -> Shares:
        """Of all tokens of the row."""
        if "tokens" not in self.cache:
            self.cache["tokens"] = Shares(self.owner(torch.arange(self.length, device=device)), self.group)
        return self.cache["tokens"]

    def cut(self, row: Tensor, filling: Tensor) -> Tensor:
        """[1, L] -> this rank's [1, S]. filling: at least as long as what the row lacks."""
        row = torch.cat([row[0], filling[: self.length - row.shape[1]]])
        return row.index_select(0, self.tokens(row.device).mine)[None]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Attention of this rank's tokens over the keys of the whole row, a span for every chunk."""
        spans = []
        for number, (start, end) in enumerate(self.chunks):
            inside = [b for b in self.bounds if start < b < end]
            first = max(b for b in self.bounds if b <= start)
            shift = number * self.chunk
            pieces = [start, *inside, end]
            spans.append(
                Span(
                    queries=(shift, shift + self.chunk),
                    keys=(first, end),
                    query_bounds=tuple(p - start for p in pieces),
                    key_bounds=tuple(p - first for p in (first, *inside, end)),
                )
            )
        return tuple(spans)

    @property
    def whole_span(self) -> Span:
        """Attention of all tokens of the row over all of them."""
        return Span((0, self.length), (0, self.length), self.bounds, self.bounds)
