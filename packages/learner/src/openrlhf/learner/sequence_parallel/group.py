"""The ranks that work on one row of tokens, and what they send each other, with gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroup:
    """Neighbouring ranks that are given the same samples and hold a part of their tokens each.

    data_group: the ranks at the same place in every group, which are given samples of their own.
    """

    size: int
    rank: int
    process_group: dist.ProcessGroup
    data_group: dist.ProcessGroup

    @staticmethod
    def of(size: int) -> SequenceGroup | None:
        """This rank's; None where rows are not cut. Collective over all ranks the first time in a process.

        Raises ValueError where the ranks are no whole number of groups.
        """
        if size == 1:
            return None
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % size:
            raise ValueError(f"`ds.ring_attn_size` {size!r} does not divide the {world} ranks of this model")
        return _group(size, dist.group.WORLD)

    def all_gather(self, local: Tensor) -> Tensor:
        """[N, ...] -> [size * N, ...], rank by rank; no gradient."""
        whole = local.new_empty(self.size * len(local), *local.shape[1:])
        dist.all_gather_single(whole, local.contiguous(), group=self.process_group)
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """[size * N, ...] -> this rank's [N, ...] of the sum over the ranks; no gradient."""
        local = whole.new_empty(len(whole) // self.size, *whole.shape[1:])
        dist.reduce_scatter_single(local, whole.contiguous(), group=self.process_group)
        return local

    def exchange(self, parts: Tensor) -> Tensor:
        """[size, ...], a part for each rank -> [size, ...], a part from each; differentiable."""
        return _Exchange.apply(parts, self)


@cache
def _group(size: int, world: Any) -> SequenceGroup:
    """world: the process group of all ranks, so that a later one gets groups of its own."""
    ranks, me = dist.get_world_size(world), dist.get_rank(world)
    rows = [list(range(start, start + size)) for start in range(0, ranks, size)]
    columns = [list(range(place, ranks, size)) for place in range(size)]
    # every rank takes part in the making of every group
    made: list[tuple[list[int], Any]] = [(members, dist.new_group(members)) for members in (*rows, *columns)]
    sequence, data = (group for members, group in made if me in members)
    return SequenceGroup(size, me % size, sequence, data)


class _Exchange(torch.autograd.Function):
    """All-to-all. Its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        found = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, parts.contiguous(), group=group.process_group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.group), None
