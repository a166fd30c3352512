"""Optimisers: AdamW, or Muon for hidden matrices with AdamW for the rest; and what Muon needs under ZeRO.

We build them ourselves: DeepSpeed's own choice on a CPU and on GPUs is an op that needs a compiler, and its rule for
Muon takes every matrix whose name lacks "embed" and "lm_head" (so also the embeddings of GPT-2 and scalar heads).

Under ZeRO, DeepSpeed 0.19.8 orthogonalises first (on stages 1 and 2 at the end of the last backward pass, on stage 3 in
its step) and then measures and clips the update, which shrinks it to nothing. So its clipping is off, and
`raw_clipping` steps in between. That can go when DeepSpeed clips the raw gradient itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from openrlhf.learner.config import OptimConfig
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.zero.partition import full_shape

logger = logging.getLogger(__name__)

MUON_METHOD = "gram"
"""DeepSpeed's Newton-Schulz with less rounding: on gradients of low rank "standard" and torch.optim.Muon, both in bf16,
are off the exact iteration by far more."""
NORM_EPSILON = 1e-6
"""DeepSpeed's, so that Adam and Muon are clipped by the same formula."""


def build_optimizer(module: LearnerModule, config: OptimConfig) -> Optimizer:
    """The optimiser over the trainable parameters of `module` (partitioned ones too)."""
    parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if config.optim == "muon":
        return _muon(parameters, matrix_ids(module), config)
    decay = [p for name, p in parameters if not exempt_from_decay(name, p)]
    rest = [p for name, p in parameters if exempt_from_decay(name, p)]
    weight_decay = config.adam.weight_decay
    if weight_decay == 0.0:
        decay, rest = decay + rest, []
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **_adam_options(config))


def _adam_options(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.adam.lr, "betas": tuple(config.adam.betas), "eps": config.adam.eps}


def exempt_from_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases and norms (everything with one dimension) are not decayed under adam."""
    return len(full_shape(parameter)) < 2 or name.endswith(".bias")


def matrix_ids(module: LearnerModule) -> set[int]:
    """ids of the hidden matrices: two dimensions, in neither an embedding nor a head."""
    outside: set[int] = set()
    for owner in module.modules():
        if isinstance(owner, nn.Embedding):
            outside.update(id(p) for p in owner.parameters(recurse=False))
    for head in (module.head, module.model.get_output_embeddings()):
        outside.update(id(p) for p in head.parameters()) if head is not None else None
    return {id(p) for p in module.parameters() if len(full_shape(p)) == 2 and id(p) not in outside}


def _muon(parameters: list[tuple[str, nn.Parameter]], matrices: set[int], config: OptimConfig) -> Optimizer:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for _, parameter in parameters:
        parameter.use_muon = id(parameter) in matrices  # pyright: ignore[reportAttributeAccessIssue]
    muon = [p for _, p in parameters if id(p) in matrices]
    rest = [p for _, p in parameters if id(p) not in matrices]
    if not muon:
        raise ValueError("`optim.optim` muon: the model has no trainable hidden matrix, use adam")
    logger.info("muon updates %d matrices, AdamW the other %d parameters", len(muon), len(rest))
    weight_decay = config.adam.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": muon, "use_muon": True, "name": "muon-params", "lr": config.muon.lr, "ns_method": MUON_METHOD}
        | {"momentum": config.muon.momentum, "weight_decay": weight_decay}
    ]
    if rest:
        groups.append(
            {"params": rest, "use_muon": False, "name": "adam-params", "weight_decay": weight_decay}
            | _adam_options(config)
        )
    return MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"fused": True})


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply a gradient of this norm with; max_norm 0 never clips."""
    return max_norm / (norm + NORM_EPSILON) if 0.0 < max_norm < norm else 1.0


def raw_clipping(zero_optimizer: Any, stage: int, max_norm: float) -> Callable[[], float]:
    """For a ZeRO optimiser around Muon: what has to be called before its step.

    It measures, clips and orthogonalises what needs it, and returns the norm before clipping; collective.
    """
    if stage == 3:
        return partial(_clip_partitions, zero_optimizer, max_norm)
    return _PartitionedOptimizer(zero_optimizer, max_norm).before_step


class _PartitionedOptimizer:
    """Stages 1 and 2: hold back the orthogonalisation, which DeepSpeed does while it fills its gradient partition."""

    def __init__(self, zero_optimizer: Any, max_norm: float) -> None:
        self._zero = zero_optimizer
        self._max_norm = max_norm
        self._fill = zero_optimizer.get_flat_partition
        self._held: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = {}
        zero_optimizer.get_flat_partition = self._fill_raw

    def _fill_raw(self, tensor_list: Any, *args: Any, **kwargs: Any) -> Any:
        """The partition of raw gradients; what is needed to fill it again with updates is kept."""
        group = kwargs["param_group_idx"]
        muon = [t for t in tensor_list if t.use_muon]
        if not muon:
            return self._fill(tensor_list, *args, **kwargs)
        self._held[group] = (tensor_list, args, kwargs, self._zero.all_grad_tensors[group])
        for tensor in muon:
            tensor.use_muon = False
        try:
            return self._fill(tensor_list, *args, **kwargs)
        finally:
            for tensor in muon:
                tensor.use_muon = True

    @torch.no_grad()
    def before_step(self) -> float:
        zero = self._zero
        zero.groups_lacking_loss_scale.clear()
        norm = float(zero.scaled_global_norm()) / zero.loss_scale
        if norm != float("inf"):  # DeepSpeed's word for a gradient that is not finite; it will skip the step
            factor = clip_factor(norm, self._max_norm)
            for group, gradients in list(zero.averaged_gradients.items()):
                if group not in self._held:
                    torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
                    continue
                tensor_list, args, kwargs, whole = self._held[group]
                torch._foreach_mul_(whole, factor)  # pyright: ignore[reportPrivateImportUsage]
                zero.all_grad_tensors[group] = whole
                zero.averaged_gradients[group] = self._fill(tensor_list, *args, **kwargs)
                zero.all_grad_tensors[group] = None
        self._held.clear()
        return norm


@torch.no_grad()
def _clip_partitions(zero: Any, max_norm: float) -> float:
    """Stage 3: gradients are still raw when its step begins."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    zero.sub_groups_lacking_loss_scale.clear()
    norm = float(combine_grad_norm_groups(zero._get_norm_groups())) / zero.loss_scale
    factor = clip_factor(norm, max_norm)
    if factor != 1.0 and norm != float("inf"):
        for gradients in zero.averaged_gradients.values():
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm
