"""Which rows of a batch begin alike, and how they lie in one row where what they share is computed once.

The samples of a prompt differ only after it. A family [prefix][tail 1]...[tail n] holds each of them whole: positions
of every tail go on where the prefix ends, and a tail sees the prefix and itself. All is read from the tokens, so the
turns of a conversation and a system prompt are shared as far as they agree. No model here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.learner.batching import Family

MIN_PREFIX = 8
"""Shorter common beginnings (a template's first tokens) are not worth a family."""
WORTH = 0.2
"""Share of the tokens that has to be saved: with less, a model of width 64 was slower than with rows apart."""
LIKE = 1.25
"""Families of like lengths are attended to together while this much more is computed than they need."""


def find_families(batch: Batch) -> list[Family]:
    """All rows of a batch, in the families that leave the fewest tokens to compute."""
    lengths = batch.lengths.tolist()
    rows = [row[:length] for row, length in zip(batch.tokens.tolist(), lengths, strict=True)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    common = [n if n >= MIN_PREFIX else 0 for n in _common(batch, order)]
    families = []
    for start, end in _cut(common, len(order)):
        members = order[start:end]
        prefix = lengths[members[0]] if end - start == 1 else min(common[start : end - 1])
        families.append(Family(tuple(sorted(members)), prefix))
    return sorted(families, key=lambda family: family.rows)


def worthwhile_families(batch: Batch) -> list[Family] | None:
    """`find_families`; None where they save less than `WORTH` of the tokens."""
    if batch.size < 2:
        return None
    families, lengths = find_families(batch), batch.lengths.tolist()
    computed, total = sum(family.tokens(lengths) for family in families), sum(lengths)
    return families if total - computed >= WORTH * total else None


def _common(batch: Batch, order: list[int]) -> list[int]:
    """How many tokens each row shares with the next, in this order."""
    tokens, real = batch.tokens[order], batch.attention_mask[order]
    same = (tokens[1:] == tokens[:-1]) & real[1:] & real[:-1]
    return same.long().cumprod(-1).sum(-1).tolist()


def _cut(common: list[int], size: int) -> list[tuple[int, int]]:
    """Runs of sorted rows, as (start, end), that save the most: each saves its prefix for all rows but one."""
    best, start = [0] * (size + 1), [0] * (size + 1)
    for end in range(1, size + 1):
        best[end], start[end] = best[end - 1], end - 1
        prefix = common[end - 2] if end > 1 else 0
        for first in range(end - 2, -1, -1):
            prefix = min(prefix, common[first])
            if prefix == 0:
                break
            saved = best[first] + (end - first - 1) * prefix
            if saved > best[end]:
                best[end], start[end] = saved, first
    runs, end = [], size
    while end > 0:
        runs.append((start[end], end))
        end = start[end]
    return runs


@dataclass(frozen=True)
class Grid:
    """Sequences that lie one after the other, laid out as the rows of a padded [N, width].

    slots: [tokens] int64, where each token goes in the flattened grid; None without padding.
    """

    lengths: tuple[int, ...]
    slots: Tensor | None

    @property
    def width(self) -> int:
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> Grid:
        """A grid as wide as the longest of them."""
        width = max(lengths)
        if all(length == width for length in lengths):
            return Grid(tuple(lengths), None)
        inside = torch.arange(width) < torch.tensor(lengths)[:, None]
        return Grid(tuple(lengths), inside.flatten().nonzero()[:, 0].to(device))


@dataclass(frozen=True)
class Block:
    """Families that are attended to together: their prefixes, then their tails.

    owner: [tails] int64, the prefix of each tail; None where there is one prefix for all. tails: None without any.
    """

    prefixes: Grid
    tails: Grid | None
    owner: Tensor | None


@dataclass(frozen=True, kw_only=True)
class SharedLayout:
    """How the families of a micro-batch lie in one row of tokens: block after block.

    cells: [tokens] int64, the cell of the flattened [B, T] that each token is taken from. positions: [tokens] int64.
    weights: [tokens] int64, how many rows each token stands for.
    starts: [B] int64, tail_starts: [B] int64, prefix: [B] int64: where a row's prefix and its tail begin, and how long
    the prefix is. family, tail: [tokens] int64, numbers of the family and of the tail in it, 0 for the prefix.
    """

    blocks: tuple[Block, ...]
    cells: Tensor
    positions: Tensor
    weights: Tensor
    starts: Tensor
    tail_starts: Tensor
    prefix: Tensor
    family: Tensor
    tail: Tensor
    masks: dict[object, object] = field(default_factory=dict, compare=False)

    def place(self, rows: Tensor, cols: Tensor) -> Tensor:
        """[N] places in the row of tokens of the cells (rows, cols) of [B, T]."""
        prefix = self.prefix[rows]
        return torch.where(cols < prefix, self.starts[rows] + cols, self.tail_starts[rows] + cols - prefix)


def lay_out(batch: Batch, families: Sequence[Family]) -> SharedLayout:
    """The layout of all rows of `batch`, each of them in one of the families."""
    device, width = batch.tokens.device, batch.tokens.shape[1]
    lengths = batch.lengths.tolist()
    blocks, runs = [], list[tuple[int, int, int, int, int, int]]()  # cell, length, position, weight, family, tail
    starts, tail_starts, prefix = ([0] * batch.size for _ in range(3))
    at = number = 0
    for members in _blocks(families, lengths):
        blocks.append(_block(members, lengths, device))
        for offset, family in enumerate(members):
            runs.append((family.rows[0] * width, family.prefix, 0, len(family.rows), number + offset, 0))
            for row in family.rows:
                starts[row], prefix[row] = at, family.prefix
            at += family.prefix
        for offset, family in enumerate(members):
            for place, row in enumerate(family.rows, 1):
                tail = lengths[row] - family.prefix
                runs.append((row * width + family.prefix, tail, family.prefix, 1, number + offset, place))
                tail_starts[row] = at
                at += tail
        number += len(members)
    table = torch.tensor(runs)
    cells, positions, weights, family_of, tail_of = (column.to(device) for column in _spread(table))
    row_starts, row_tails, prefixes = (torch.tensor(values).to(device) for values in (starts, tail_starts, prefix))
    return SharedLayout(
        blocks=tuple(blocks),
        cells=cells,
        positions=positions,
        weights=weights,
        starts=row_starts,
        tail_starts=row_tails,
        prefix=prefixes,
        family=family_of,
        tail=tail_of,
    )


def _spread(table: Tensor) -> tuple[Tensor, ...]:
    """Runs (cell, length, position, weight, family, tail) -> the same for each of their tokens."""
    cell, length, position, *constant = table.unbind(-1)
    step = torch.arange(int(length.sum())) - (length.cumsum(0) - length).repeat_interleave(length)
    counted = [column.repeat_interleave(length) + step for column in (cell, position)]
    return *counted, *(column.repeat_interleave(length) for column in constant)


def _blocks(families: Sequence[Family], lengths: Sequence[int]) -> Iterator[list[Family]]:
    """Families of like lengths: the grids of a block are not much larger than what they hold."""
    shapes = {family: _Shape.of(family, lengths) for family in families}
    members: list[Family] = []
    joined, alone = _Shape(0, 0, 0, 0), 0
    for family in sorted(families, key=lambda f: (shapes[f].tail, f.prefix, f.rows)):
        with_it = joined.join(shapes[family])
        if members and with_it.work > LIKE * (alone + shapes[family].work):
            yield members
            members, with_it, alone = [], shapes[family], 0
        members.append(family)
        joined, alone = with_it, alone + shapes[family].work
    if members:
        yield members


@dataclass(frozen=True)
class _Shape:
    """Grids of some families: how many prefixes and tails, and the longest of each."""

    prefixes: int
    prefix: int
    tails: int
    tail: int

    @staticmethod
    def of(family: Family, lengths: Sequence[int]) -> _Shape:
        return _Shape(1, family.prefix, len(family.rows), max(lengths[row] - family.prefix for row in family.rows))

    def join(self, other: _Shape) -> _Shape:
        longest = max(self.prefix, other.prefix), max(self.tail, other.tail)
        return _Shape(self.prefixes + other.prefixes, longest[0], self.tails + other.tails, longest[1])

    @property
    def work(self) -> int:
        """Cells of the attention matrices."""
        return self.prefixes * self.prefix * self.prefix // 2 + self.tails * self.tail * (self.prefix + self.tail)


def _block(families: Sequence[Family], lengths: Sequence[int], device: torch.device) -> Block:
    tails = [lengths[row] - family.prefix for family in families for row in family.rows]
    prefixes = Grid.of([family.prefix for family in families], device)
    if not any(tails):
        return Block(prefixes, None, None)
    owner = torch.arange(len(families)).repeat_interleave(torch.tensor([len(f.rows) for f in families]))
    return Block(prefixes, Grid.of(tails, device), owner.to(device) if len(families) > 1 else None)
