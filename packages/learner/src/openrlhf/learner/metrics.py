"""Metrics of one optimiser step: (sum, count) over micro-batches, then over ranks in a single reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from openrlhf.core.losses.output import LossOutput
from openrlhf.learner.collective import Collective


class MetricSums:
    """Adds up the metrics of micro-batches without waiting for the device."""

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
