"""Which units a step trains on, and this rank's share of them as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        steps = [[int(i) for i in order[at : at + self.batch_size]] for at in range(start, len(order), self.batch_size)]
        shares = [self._share(step) for step in steps]
        loader: DataLoader[list[tuple[int, Unit]]] = DataLoader(
            _Units(self.dataset, shares),
            batch_size=None,
            num_workers=self._workers,
            generator=torch.Generator(),  # without one it would draw from torch's own, which a resumed run must not see
        )
        for step, units in zip(steps, loader, strict=True):
            yield step, collate(units, margins=self._margins)

    def _share(self, step: Sequence[int]) -> list[int]:
        costs = [sample_cost(int(self.dataset.lengths[i]), self._hidden_size) for i in step]
        return [step[place] for place in partition_by_cost(costs, self._world_size)[self._rank]]


class _Units(Dataset[list[tuple[int, Unit]]]):
    """Item k: the units of this rank's share of step k."""

    def __init__(self, dataset: SupervisedDataset, shares: Sequence[Sequence[int]]) -> None:
        self._dataset = dataset
        self._shares = shares

    def __len__(self) -> int:
        return len(self._shares)

    def __getitem__(self, step: int) -> list[tuple[int, Unit]]:
        return [(i, self._dataset.unit(i)) for i in self._shares[step]]
