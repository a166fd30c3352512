"""`LossOutput`: a loss as (sum, count), so that it adds up exactly over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """One loss term of one micro-batch.

    total: scalar tensor with gradient, the SUM over this micro-batch's units (tokens, sequences or pairs).
    count: how many units that is (a float; 0 for an empty micro-batch, then total is 0 with zero gradient).
           It depends on masks only, never on the model, so that the learner can reduce it over all micro-batches
           and ranks of the optimiser step before the first forward: loss = sum(total) / sum(count).
    metrics: name -> (sum, count), detached floats or scalar tensors; averaged the same way.
    """

    total: Tensor
    count: float
    metrics: dict[str, tuple[Tensor | float, float]] = field(default_factory=dict)
