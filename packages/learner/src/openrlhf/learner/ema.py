"""Exponential moving average of the trained weights, kept in host memory in float32.

The ranks hold it once together, each what the backend calls its part. What is saved and exported is always whole, so it
does not depend on the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.learner.engine import TrainingEngine


class MovingAverage:
    """average := beta · average + (1 − beta) · weights, after every optimiser step; starts at the loaded weights."""

    def __init__(self, engine: TrainingEngine, beta: float) -> None:
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"`batch.ema_beta` must be in [0, 1], got {beta!r}")
        self._beta = beta
        self._engine = engine
        named = engine.module.named_parameters()
        self._parameters = {engine.module.hf_name(name): p for name, p in named if p.requires_grad}
        self._averages: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            part = engine.part(parameter)
            if part is not None:
                self._averages[name] = part.to("cpu", torch.float32, copy=True)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present weights. Every rank by itself."""
        for name, average in self._averages.items():
            part = self._engine.part(self._parameters[name])
            assert part is not None, "a rank keeps its part of a parameter"
            average.lerp_(part.to("cpu", torch.float32), 1.0 - self._beta)

    def full_state(self) -> dict[str, Tensor] | None:
        """The whole averages in float32 on rank 0, None elsewhere. Collective."""
        joined = {name: self._engine.join(p, self._averages.get(name)) for name, p in self._parameters.items()}
        return {name: whole for name, whole in joined.items() if whole is not None} or None

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        """Restore whole averages, as `full_state` gave them; every rank takes its part."""
        if state.keys() != self._parameters.keys():
            raise ValueError("the checkpoint averages other parameters than those trained now")
        for name, average in self._averages.items():
            average.copy_(self._engine.cut(self._parameters[name], state[name]))
