"""Which samples go where: shares per rank and micro-batches per share. Pure Python on lengths.

Samples that begin alike may come as a `Family`, whose common prefix is computed and charged once per micro-batch.
The order of samples never matters to a result, because every mean is over the whole optimiser step; so a plan is free
to sort for speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def sample_cost(length: int, hidden_size: int) -> float:
    """Relative cost of a forward pass: linear layers ∝ length, attention ∝ length².

    Per token and layer a transformer spends about 24·hidden² floating-point operations in matrices and 4·length·hidden
    in attention, so the cost in units of one token's matrices is length·(1 + length / (6·hidden)).
    """
    return length * (1.0 + length / (6.0 * hidden_size))


@dataclass(frozen=True)
class Family:
    """Rows that begin with the same `prefix` tokens; a row alone is all prefix."""

    rows: tuple[int, ...]
    prefix: int

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens that are computed. lengths: of all rows."""
        return self.prefix + sum(lengths[row] - self.prefix for row in self.rows)

    def cost(self, lengths: Sequence[int], hidden_size: int) -> float:
        """As `sample_cost`, with the prefix once."""
        prefix = sample_cost(self.prefix, hidden_size)
        return prefix + sum(sample_cost(lengths[row], hidden_size) - prefix for row in self.rows)


def partition_by_cost(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split samples into `parts` shares of nearly equal cost (longest processing time first).

    Returns the sample numbers of each share, ascending. With fewer samples than parts some shares are empty.
    """
    if parts < 1:
        raise ValueError(f"cannot split samples into {parts!r} shares")
    shares: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, 0, part) for part in range(parts)]
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, size, part = heap[0]
        shares[part].append(number)
        heapq.heapreplace(heap, (load + costs[number], size + 1, part))
    return [sorted(share) for share in shares]


def fixed_micro_batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Micro-batches of `size` samples, of like lengths so that little is padding."""
    if size < 1:
        raise ValueError(f"a micro-batch needs at least one sample, got {size!r}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)) if len(lengths) > size else range(len(lengths))
    return [sorted(order[i : i + size]) for i in range(0, len(lengths), size)]


def padded_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of rows that are padded to their longest: at most `max_tokens` tokens each, padding included.

    Sorted by length, every micro-batch takes rows as long as they fit. A sample longer than the budget is a micro-batch
    of its own.
    """
    plan: list[list[int]] = []
    width = 0
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if plan and (len(plan[-1]) + 1) * width <= max_tokens:
            plan[-1].append(number)
        else:
            plan.append([number])
            width = lengths[number]
    return [sorted(rows) for rows in plan]


def family_micro_batches(families: Sequence[Family], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Micro-batches of `size` samples that follow the families: few of them are cut. lengths: of all rows."""
    if size < 1:
        raise ValueError(f"a micro-batch needs at least one sample, got {size!r}")
    order: list[int] = []
    for family in sorted(families, key=lambda f: (-max(lengths[row] for row in f.rows), f.rows)):
        order += sorted(family.rows, key=lambda row: (-lengths[row], row))
    return [sorted(order[i : i + size]) for i in range(0, len(order), size)]


def family_token_micro_batches(
    families: Sequence[Family], lengths: Sequence[int], max_tokens: int, *, hidden_size: int
) -> list[list[int]]:
    """As `token_micro_batches`, with the prefix of a family counted once. Families over the budget are cut."""
    parts = [part for family in families for part in _cut_family(family, lengths, max_tokens)]
    tokens = [part.tokens(lengths) for part in parts]
    costs = [part.cost(lengths, hidden_size) for part in parts]
    plan = _balanced_micro_batches(tokens, costs, max_tokens)
    return [sorted(row for number in numbers for row in parts[number].rows) for numbers in plan]


def _cut_family(family: Family, lengths: Sequence[int], max_tokens: int) -> list[Family]:
    """The fewest parts of at most `max_tokens` tokens each, or of one row."""
    if family.tokens(lengths) <= max_tokens:
        return [family]
    rows = family.rows
    tails = [max(lengths[row] - family.prefix, 1) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (-tails[i], i))
    return [
        Family(tuple(rows[i] for i in part), family.prefix)
        for part in _best_fit(tails, order, max_tokens - family.prefix)
    ]


def token_micro_batches(lengths: Sequence[int], max_tokens: int, *, hidden_size: int) -> list[list[int]]:
    """The fewest micro-batches of at most `max_tokens` tokens each, then balanced by cost.

    A sample longer than the budget is a micro-batch of its own.
    """
    return _balanced_micro_batches(lengths, [sample_cost(length, hidden_size) for length in lengths], max_tokens)


def _balanced_micro_batches(lengths: Sequence[int], costs: Sequence[float], max_tokens: int) -> list[list[int]]:
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = len(_best_fit(lengths, order, max_tokens))
    balanced = partition_by_cost(costs, count)
    if all(_fits(share, lengths, max_tokens) for share in balanced):
        return [share for share in balanced if share]
    capped = _balanced_under_budget(lengths, costs, order, max_tokens, count)
    return capped if capped is not None else _best_fit(lengths, order, max_tokens)


def _fits(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> bool:
    return len(share) <= 1 or sum(lengths[i] for i in share) <= max_tokens


def _best_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sample goes where the least room is left after it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number in order:
        need = lengths[number]
        best = min((b for b in range(len(bins)) if room[b] >= need), key=room.__getitem__, default=None)
        if best is None:
            bins.append([number])
            room.append(max_tokens - need)
        else:
            bins[best].append(number)
            room[best] -= need
    return [sorted(share) for share in bins]


def _balanced_under_budget(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], max_tokens: int, count: int
) -> list[list[int]] | None:
    """Cheapest bin that still has room, for each sample by falling length; None when some sample finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room, load = [max_tokens] * count, [0.0] * count
    for number in order:
        fitting = [b for b in range(count) if room[b] >= lengths[number] or not bins[b]]
        if not fitting:
            return None
        target = min(fitting, key=load.__getitem__)
        bins[target].append(number)
        room[target] -= lengths[number]
        load[target] += costs[number]
    return [sorted(share) for share in bins if share]
