"""Which sample goes into which optimiser step and onto which rank: pure functions of lengths and a seed.

Nothing sampled is lost: the last mini-batch may be smaller than train.batch_size, and a rank with nothing to do
takes part with an empty share.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import TypeVar

from openrlhf.launcher.samples import SampleRef
from openrlhf.learner.batching import Family, sample_cost

T = TypeVar("T")


def cut_mini_batches(samples: Sequence[SampleRef], *, batch_size: int, seed: int, step: int) -> list[list[SampleRef]]:
    """Shuffle the rollout batch with (seed, step) and cut it in mini-batches of `batch_size` samples.

    The last one may be smaller. From the second epoch on the members are others, see `epoch_seed`.
    """
    order = list(samples)
    random.Random(f"mini-batches {seed} {step}").shuffle(order)
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def epoch_order(num_mini_batches: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """The order of the mini-batches in one epoch; the first epoch keeps the order of the cut."""
    order = list(range(num_mini_batches))
    if epoch > 0:
        random.Random(f"epoch {seed} {step} {epoch}").shuffle(order)
    return order


def epoch_seed(num_mini_batches: int, *, seed: int, step: int, epoch: int) -> str | None:
    """What decides which samples share a mini-batch in this epoch; None: those of the cut, as in the first epoch."""
    return f"members {seed} {step} {epoch}" if epoch > 0 and num_mini_batches > 1 else None


Shares = list[list[SampleRef]]


def split_over_ranks(
    samples: Sequence[SampleRef], ranks: int, *, hidden_size: int, share_prompt: bool = False
) -> Shares:
    """Balance one mini-batch over ranks: the rank with the most work gets as little as possible, in equal counts.

    hidden_size: the model's, for the cost of a sample (`learner.batching.sample_cost`).
    share_prompt: a rank computes the prompt of a group once. So groups stay whole where the rank with the most work
    then has less of it; else, and without, the samples are spread by themselves.
    Every rank gets floor(n / ranks) or ceil(n / ranks) samples, so a rank gets none only when there are fewer
    samples than ranks.
    """
    shares = _spread([[sample] for sample in samples], ranks, hidden_size)
    if share_prompt and ranks > 1:
        whole = _spread(_groups(samples), ranks, hidden_size)
        shares = min(shares, whole, key=lambda found: max(shared_cost(share, hidden_size) for share in found))
    return [sorted(share, key=lambda s: s.index) for share in shares]


def shared_cost(samples: Sequence[SampleRef], hidden_size: int) -> float:
    """Cost of a rank's share in which prompts are computed once."""
    return sum(_family_cost(group, hidden_size) for group in _groups(samples))


def _groups(samples: Sequence[SampleRef]) -> list[list[SampleRef]]:
    """The samples of each prompt."""
    found: dict[int, list[SampleRef]] = {}
    for sample in samples:
        found.setdefault(id(sample.handle), []).append(sample)
    return list(found.values())


def _family_cost(group: Sequence[SampleRef], hidden_size: int) -> float:
    if len(group) == 1:
        return sample_cost(group[0].length, hidden_size)
    prefix = min(sample.prompt_length for sample in group)
    return Family(tuple(range(len(group))), prefix).cost([sample.length for sample in group], hidden_size)


def _spread(units: Sequence[Sequence[SampleRef]], ranks: int, hidden_size: int) -> Shares:
    """The most expensive unit first, onto the rank with the least work; cut where no rank has room for all of it."""
    count = sum(map(len, units))
    limit = -(-count // ranks)
    spare = count - (limit - 1) * ranks  # how many ranks may hold `limit` samples
    shares: Shares = [[] for _ in range(ranks)]
    # How many more samples -> (load, rank) of the ranks that may hold so many, as a heap.
    rooms = {limit: [(0.0, rank) for rank in range(ranks)]} if count else {}
    waiting = [(-_family_cost(unit, hidden_size), unit[0].index, list(unit)) for unit in units]
    heapq.heapify(waiting)
    while waiting:
        unit = heapq.heappop(waiting)[-1]
        widest = max(rooms)
        if widest < len(unit):
            unit, rest = unit[:widest], unit[widest:]
            heapq.heappush(waiting, (-_family_cost(rest, hidden_size), rest[0].index, rest))
        room = min((room for room in rooms if room >= len(unit)), key=lambda room: rooms[room][0])
        load, rank = heapq.heappop(rooms[room])
        if not rooms[room]:
            del rooms[room]
        shares[rank] += unit
        if room > len(unit):
            heapq.heappush(rooms.setdefault(room - len(unit), []), (load + _family_cost(unit, hidden_size), rank))
        if len(shares[rank]) == limit:
            spare -= 1
            if not spare:  # from now on nobody else may hold `limit`
                rooms = {room - 1: heap for room, heap in rooms.items() if room > 1}
    return shares
