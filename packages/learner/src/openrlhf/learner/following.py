"""A frozen model that follows another one: weights := alpha · other + (1 − alpha) · weights, now and then.

With alpha 1 a reset of the reference (Liu et al., "ProRL", 2025, section 2.3.2), below 1 a soft update (Gorbatovski et
al., "Learn Your Reference Model for Real Good Alignment", 2024, eq. 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from openrlhf.learner.collective import rank_and_world
from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.folders.shared import sizes_below

FILE = "reference.safetensors"


class Following:
    """What one rank does; the ranks hold the model as its backend spreads it, that of the other one does not matter.

    alpha in (0, 1]. Below 1 the average of a model in 16 bit is kept in float32 in host memory, as much of it as the
    rank holds of the model: in 16 bit it would stop moving when alpha times the difference is below the rounding.
    """

    def __init__(self, engine: TrainingEngine, alpha: float) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"`follow_alpha` must be in (0, 1], got {alpha!r}")
        self._engine, self._alpha = engine, alpha
        named = engine.module.named_parameters()
        self._parameters = {engine.module.hf_name(name): p for name, p in named}
        self._exact: dict[str, Tensor] = {}
        if alpha < 1:
            for name, parameter in self._parameters.items():
                if parameter.dtype != torch.float32:
                    self._exact[name] = engine.held(parameter).to("cpu", torch.float32, copy=True)

    @torch.no_grad()
    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Move towards whole tensors of the other model. Every rank by itself, with the same ones."""
        for name, whole in tensors:
            parameter = self._parameters[name]
            part, exact = self._engine.cut(parameter, whole), self._exact.get(name)
            if exact is not None:
                part = exact.lerp_(part.to(exact), self._alpha)
            elif self._alpha < 1:
                held = self._engine.held(parameter)
                part = torch.lerp(held, part.to(held), self._alpha)
            self._engine.put(parameter, part)

    def save(self, folder: Path) -> dict[str, int]:
        """Write the whole weights into a new `folder`, of what is kept in float32 that. Collective.

        Returns the files that rank 0 has written, with their bytes; {} on the others.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            part = self._engine.part(parameter)
            whole = self._engine.join(parameter, None if part is None else self._exact.get(name, part))
            if whole is not None:
                state[name] = whole.contiguous()
        if rank_and_world()[0] != 0:
            return {}
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, str(folder / FILE))
        return sizes_below(folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, with any number of ranks. Raises ValueError for another model's."""
        from safetensors import safe_open

        with safe_open(str(folder / FILE), framework="pt") as file:
            if set(file.keys()) != self._parameters.keys():
                raise ValueError(f"the reference in {str(folder)!r} has other parameters than `model_path` has now")
            for name, parameter in self._parameters.items():
                part = self._engine.cut(parameter, file.get_tensor(name))
                if name in self._exact:
                    self._exact[name].copy_(part)
                self._engine.put(parameter, part)
