"""Optimisers: AdamW, or Muon for hidden matrices with AdamW for the rest.

We build them ourselves: DeepSpeed's own choice on a CPU and on GPUs is an op that needs a compiler, and its rule for
Muon takes every matrix whose name lacks "embed" and "lm_head" (so also the embeddings of GPT-2 and scalar heads).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from openrlhf.learner.config import OptimConfig
from openrlhf.learner.modules import LearnerModule

logger = logging.getLogger(__name__)

MUON_METHOD = "gram"
"""DeepSpeed's Newton-Schulz with less rounding: on gradients of low rank "standard" and torch.optim.Muon, both in bf16,
are off the exact iteration by far more."""


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


def full_ndim(parameter: nn.Parameter) -> int:
    """Dimensions of the whole parameter; under ZeRO-3 the local one is flat."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def exempt_from_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases and norms (everything with one dimension) are not decayed under adam."""
    return full_ndim(parameter) < 2 or name.endswith(".bias")


def matrix_ids(module: LearnerModule) -> set[int]:
    """ids of the hidden matrices: two dimensions, in neither an embedding nor a head."""
    outside: set[int] = set()
    for owner in module.modules():
        if isinstance(owner, nn.Embedding):
            outside.update(id(p) for p in owner.parameters(recurse=False))
    heads: Iterable[nn.Module | None] = (module.head, module.model.get_output_embeddings())
    for head in heads:
        if head is not None:
            outside.update(id(p) for p in head.parameters())
    return {id(p) for p in module.parameters() if full_ndim(p) == 2 and id(p) not in outside}


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
