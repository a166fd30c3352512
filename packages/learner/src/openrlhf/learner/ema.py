"""Exponential moving average of the trained weights, kept in host memory in float32.

Whole weights on rank 0, under ZeRO-3 each rank's own partition, under tensor parallelism the shards of rank 0's group.
What is saved and exported is always whole, so it does not depend on the number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.tensor_parallel import TensorParallel
from openrlhf.learner.weights import full_shape


def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter: its partition, or all of it."""
    part = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter  # pyright: ignore[reportAttributeAccessIssue]
    return part.detach()


class MovingAverage:
    """average := beta · average + (1 − beta) · weights, after every optimiser step; starts at the loaded weights."""

    def __init__(self, module: LearnerModule, tensor_parallel: TensorParallel, beta: float) -> None:
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"`batch.ema_beta` must be in [0, 1], got {beta!r}")
        self._beta = beta
        self._tensor_parallel = tensor_parallel
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._parameters = {module.hf_name(n): p for n, p in module.named_parameters() if p.requires_grad}
        self._averages = {
            name: _local(p).to("cpu", torch.float32, copy=True)
            for name, p in self._parameters.items()
            if tensor_parallel.has_rank_0 or hasattr(p, "ds_id")
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present weights. Every rank by itself."""
        for name, average in self._averages.items():
            average.lerp_(_local(self._parameters[name]).to("cpu", torch.float32), 1.0 - self._beta)

    def full_state(self) -> dict[str, Tensor] | None:
        """The whole averages in float32 on rank 0, None elsewhere. Collective."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if not hasattr(parameter, "ds_id"):
                if self._tensor_parallel.has_rank_0:
                    state[name] = self._whole(parameter, self._averages[name])
                continue
            device = _local(parameter).device
            mine = self._averages[name].to(device)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            if self._rank == 0:
                shape = full_shape(parameter)
                state[name] = torch.cat(parts)[: torch.Size(shape).numel()].view(shape).cpu()
        return state if self._rank == 0 else None

    def _whole(self, parameter: nn.Parameter, average: Tensor) -> Tensor:
        """A copy of the whole average; it travels on the parameter's device."""
        return self._tensor_parallel.whole(parameter, average.to(parameter.device)).to("cpu", copy=True)

    def load_full_state(self, state: dict[str, Tensor]) -> None:
        """Restore whole averages, as `full_state` gave them; every rank takes its part."""
        if state.keys() != self._parameters.keys():
            raise ValueError("the checkpoint averages other parameters than those trained now")
        for name, average in self._averages.items():
            whole = state[name].flatten()
            if not hasattr(self._parameters[name], "ds_id"):
                average.copy_(self._tensor_parallel.local(self._parameters[name], state[name]))
                continue
            size = average.numel()
            part = whole[self._rank * size : (self._rank + 1) * size]
            average.zero_()
            average[: part.numel()] = part
