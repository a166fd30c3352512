"""Moving training states to host memory between training phases, and back (`ds.enable_sleep`).

Weights stay on the device, because they are scored with and sent between the phases. Master weights, optimiser states
and gradient buffers go. DeepSpeed 0.19.8 does this on stages 1 and 2; on stage 3 only for its own FusedAdam, and on
stage 0 not at all, so there we move the tensors ourselves. With `ds.adam_offload` master weights and optimiser states
live in host memory and stay there. On a CPU there is nowhere to move to: everything here is a no-op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openrlhf.learner.setup import give_back


def sleep(ds_engine: Any, stage: int, device: torch.device, *, host_optimizer: bool = False) -> None:
    """Free device memory. Calling it twice is harmless.

    host_optimizer: master weights and optimiser states live in host memory anyway (`ds.adam_offload`).
    """
    if device.type == "cpu":
        return
    if stage > 0:
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        states = [State.lp_grads, State.contiguous_grad_buffer]
        states += [] if stage == 3 else [State.optim_states, State.hp_params]
        ds_engine.offload_states(include=states, device=OffloadDeviceEnum.cpu, pin_memory=False)
    if moves_own_states(stage, host_optimizer):
        move_states(ds_engine, stage, torch.device("cpu"))
    give_back(device)


def wake(ds_engine: Any, stage: int, device: torch.device, *, host_optimizer: bool = False) -> None:
    """Bring everything back that `sleep` moved. Must run before the next `update`."""
    if device.type == "cpu":
        return
    if stage > 0:
        ds_engine.reload_states()
    if moves_own_states(stage, host_optimizer):
        move_states(ds_engine, stage, device)
    torch.cuda.synchronize(device)


def moves_own_states(stage: int, host_optimizer: bool) -> bool:
    """Whether we move states ourselves. DeepSpeed leaves offloaded ones alone, and stage 0 does not offload them."""
    return stage == 0 or (stage == 3 and not host_optimizer)


def move_states(ds_engine: Any, stage: int, device: torch.device) -> None:
    """Move optimiser states (and on stage 3 master weights) in place, so that every reference to them follows."""
    own = list(ds_engine.optimizer.fp32_partitioned_groups_flat) if stage == 3 else []
    for state in ds_engine.basic_optimizer.state.values():
        # AdamW's step counter has one element; its place decides nothing
        own += [value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]
    for tensor in own:
        tensor.data = tensor.data.to(device)
