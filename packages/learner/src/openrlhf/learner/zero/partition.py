"""ZeRO-3: parameters that every rank holds a part of. How they come into being, and how they become whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.learner.heads import TokenHead
from openrlhf.learner.layers import recurrent_layers
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.teaching import TeachingHead


@contextmanager
def loading(config: dict[str, Any]) -> Iterator[None]:
    """While it is open, transformers partitions what it loads. config: DeepSpeed's dictionary."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    registration = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        del registration  # transformers holds it weakly: dropping it lets the next model load whole


def gather_with_readers(module: LearnerModule) -> None:
    """Let ZeRO-3 gather parameters for the calls of those who read them without calling the module they belong to.

    Its hooks gather what belongs to a called module. A layer with a state reads the weight of its convolution, and a
    `TokenHead` that of the output layer. DeepSpeed notices such a read in an eager forward pass of its engine, not in
    one that is compiled or repeated in the backward pass.
    """
    from deepspeed.runtime.zero import register_external_parameter

    for head in (module.head, module.teaching):
        for parameter in head.borrowed if isinstance(head, TokenHead | TeachingHead) else ():
            register_external_parameter(head, parameter)
    if recurrent_layers(module.model.config):
        for owner in module.model.modules():
            for child in owner.children():
                if isinstance(child, nn.Conv1d):
                    for parameter in child.parameters():
                        register_external_parameter(owner, parameter)


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed took the parameter apart."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, also while it is partitioned: then the local one is flat."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def gathered(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
    """Within it the parameters are whole on every rank (collective where they are partitioned, else nothing)."""
    partitioned = [p for p in parameters if is_partitioned(p)]
    if not partitioned:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)


def own(parameter: nn.Parameter) -> Tensor:
    """This rank's partition [n], flat; the last rank's is padded."""
    return parameter.ds_tensor.detach()  # pyright: ignore[reportAttributeAccessIssue]


def forget_whole(parameter: nn.Parameter) -> None:
    """Drop the whole tensor that ZeRO-3 keeps of a small parameter once it was gathered; its partition changed."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if parameter.ds_status is ZeroParamStatus.AVAILABLE:  # pyright: ignore[reportAttributeAccessIssue]
        parameter.partition()  # pyright: ignore[reportAttributeAccessIssue]


def join(parameter: nn.Parameter, part: Tensor, *, wanted: bool) -> Tensor | None:
    """The whole tensor in host memory, of what all ranks have in place of their partitions; None where not wanted."""
    mine = part.to(own(parameter).device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    if not wanted:
        return None
    shape = full_shape(parameter)
    return torch.cat(parts)[: torch.Size(shape).numel()].view(shape).cpu()


def cut(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's partition of a whole tensor."""
    size = own(parameter).numel()
    part = whole.flatten()[dist.get_rank() * size :][:size]
    return nn.functional.pad(part, (0, size - part.numel()))
