"""Which units a step trains on, and this rank's share of them as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from openrlhf.core.batch import Batch
from openrlhf.launcher.data.readers import Unit
from openrlhf.launcher.data.supervised import SupervisedDataset, collate
from openrlhf.learner.batching import partition_by_cost, sample_cost


class Batches:
    """Consecutive batches of `batch_size` units over all ranks, shared out by cost; the last one may be smaller.

    workers: processes that read and tokenise ahead; 0 reads in this one.
    """

    def __init__(
        self,
        dataset: SupervisedDataset,
        *,
        batch_size: int,
        hidden_size: int,
        rank: int,
        world_size: int,
        workers: int = 0,
        margins: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._hidden_size = hidden_size
        self._rank, self._world_size = rank, world_size
        self._workers = workers
        self._margins = margins

    @property
    def count(self) -> int:
        """Batches in one pass over the data."""
        return -(-len(self.dataset) // self.batch_size)

    def run(self, order: Sequence[int] | np.ndarray, *, start: int = 0) -> Iterator[tuple[list[int], Batch]]:
        """(units of the whole step, this rank's share) of every batch of `order`, from place `start` on."""
        steps = _Steps(self.dataset, order, start, self.batch_size, self._share)
        loader: DataLoader[tuple[list[int], list[tuple[int, Unit]]]] = DataLoader(
            steps,
            batch_size=None,
            num_workers=self._workers,
            generator=torch.Generator(),  # without one it would draw from torch's own, which a resumed run must not see
        )
        for step, units in loader:
            yield step, collate(units, margins=self._margins)

    def _share(self, step: Sequence[int]) -> list[int]:
        costs = [sample_cost(int(self.dataset.lengths[i]), self._hidden_size) for i in step]
        return [step[place] for place in partition_by_cost(costs, self._world_size)[self._rank]]


class _Steps(Dataset[tuple[list[int], list[tuple[int, Unit]]]]):
    """Item k: the units of step k, and those of this rank's share of it with their tokens."""

    def __init__(
        self,
        dataset: SupervisedDataset,
        order: Sequence[int] | np.ndarray,
        start: int,
        batch_size: int,
        share: Callable[[Sequence[int]], list[int]],
    ) -> None:
        self._dataset, self._share = dataset, share
        self._order, self._start, self._batch_size = order, start, batch_size

    def __len__(self) -> int:
        return len(range(self._start, len(self._order), self._batch_size))

    def __getitem__(self, step: int) -> tuple[list[int], list[tuple[int, Unit]]]:
        at = self._start + step * self._batch_size
        units = [int(i) for i in self._order[at : at + self._batch_size]]
        return units, [(i, self._dataset.unit(i)) for i in self._share(units)]
