"""The few reductions a learner needs, over the data-parallel ranks of its role, and the metrics of a step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.losses.output import LossOutput

NONE = 2**62
T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """This rank among all of its role, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_same(batch: Batch, group: dist.ProcessGroup, device: torch.device, kind: str) -> None:
    """AssertionError unless the ranks of a group were given the same samples, which nothing else would notice."""
    weights = torch.arange(1, batch.size + 1, device=batch.tokens.device)[:, None]
    mine = torch.tensor([batch.size, int((batch.tokens * weights).sum())], device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    assert all(torch.equal(part, mine) for part in parts), f"ranks of a {kind} group got different samples"


class Collective:
    """Reductions in float64, so that counts stay exact. With one rank nothing is communicated."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self.group = group
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; the argument is not changed."""
        if self.world_size == 1:
            return tensor.clone()
        out = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(out, group=self.group)
        return out.to(tensor.device)

    def max(self, value: float) -> float:
        """Largest value over ranks."""
        return max(row[0] for row in self._gather([value]))

    def agree(
        self, counts: Mapping[str, float], micro_batches: int, empty: bool
    ) -> tuple[dict[str, float], int, list[bool]]:
        """What every rank must know before a step: summed counts, the largest micro-batch count, who has no samples."""
        names = sorted(counts)
        rows = self._gather([float(micro_batches), float(empty), *(counts[name] for name in names)])
        summed = {name: sum(row[2 + i] for row in rows) for i, name in enumerate(names)}
        return summed, int(max(row[0] for row in rows)), [bool(row[1]) for row in rows]

    def sum_named(self, sums: Mapping[str, tuple[Tensor | float, float]]) -> dict[str, tuple[float, float]]:
        """Sum (sum, count) pairs over ranks in one reduction. All ranks have the same names."""
        names = sorted(sums)
        checksum = float(zlib.crc32(" ".join(names).encode()))
        values = [torch.as_tensor(sums[name][0], dtype=torch.float64, device=self.device) for name in names]
        counts = torch.tensor([checksum, *(sums[name][1] for name in names)], dtype=torch.float64, device=self.device)
        total = self.sum(torch.cat([torch.stack(values), counts]) if values else counts).tolist()
        assert total[len(names)] == checksum * self.world_size, f"ranks measure different things, this one {names}"
        return {name: (total[i], total[len(names) + 1 + i]) for i, name in enumerate(names)}

    def share_names(self, names: list[str], empty_ranks: Sequence[bool]) -> list[str]:
        """The metric names of a rank that has samples, for those that have none."""
        if self.world_size == 1 or not any(empty_ranks):
            return names
        source = list(empty_ranks).index(False)
        box = [names]
        first = dist.get_global_rank(self.group, source) if self.group else source
        dist.broadcast_object_list(box, src=first, group=self.group)
        return box[0]

    def first_non_negative(self, value: int) -> int:
        """Smallest non-negative value over ranks, -1 when there is none."""
        smallest = min(row[0] for row in self._gather([float(value if value >= 0 else NONE)]))
        return -1 if smallest == NONE else int(smallest)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank of the role, those of other shards too."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return flag
        seen = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen.item())

    def everyone(self, value: T) -> list[T]:
        """A picklable value of each rank of the role, those of other shards too, in order."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks of the role, those of other shards too."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def _gather(self, row: list[float]) -> list[list[float]]:
        """The same-length rows of all ranks, in order."""
        if self.world_size == 1:
            return [row]
        mine = torch.tensor(row, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self.group)
        return [r.tolist() for r in rows]


class MetricSums:
    """(sum, count) metrics of one step: added up over micro-batches without waiting for the device, then over ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, float]] = {}

    def add(self, terms: Mapping[str, LossOutput]) -> None:
        """Take in the losses of one micro-batch; a loss without metrics counts under the name of its term."""
        for name, term in terms.items():
            metrics = term.metrics or {name: (term.total.detach(), term.count)}
            for key, (total, count) in metrics.items():
                old_total, old_count = self._sums.get(key, (0.0, 0.0))
                self._sums[key] = (old_total + total, old_count + count)

    def reduce(self, collective: Collective, empty_ranks: Sequence[bool]) -> dict[str, tuple[float, float]]:
        """Sums over all ranks. empty_ranks: who had no samples and so does not know the names."""
        names = collective.share_names(sorted(self._sums), empty_ranks)
        return collective.sum_named({name: self._sums.get(name, (0.0, 0.0)) for name in names})
