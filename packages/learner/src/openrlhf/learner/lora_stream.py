"""Adapters in the weight stream: merged into the weights that they belong to, or apart from them.

What is made of an adapter is peft's own: its product, its scale, its way round of a matrix. Files are `lora.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from openrlhf.learner.modules import LearnerModule

ADAPTER = "default"
"""The name of the one adapter of a model."""
PEFT_PREFIX = "base_model.model."
"""What peft puts before the names of an adapter's tensors in files."""
BASE = ".base_layer"
EXPERTS = ".experts."

Form = Literal["merged", "apart"]
"""merged: W + scale x BA under the name of W (or what the kind of adapter makes of them). apart: W as it is, and A and
scale x B under peft's names."""


@dataclass(frozen=True)
class Streamed:
    """One tensor of the stream: its name and the parameters that it is made of; it has the form of the first."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    make: Callable[[Sequence[Tensor]], Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Of 4-bit weights, that in which they compute."""
        state = getattr(self.parameters[0], "quant_state", None)
        return self.parameters[0].dtype if state is None else state.dtype

    @property
    def shape_in_full(self) -> tuple[int, ...] | None:
        """Of 4-bit weights, which lie packed in their parameter; None for all others."""
        state = getattr(self.parameters[0], "quant_state", None)
        return None if state is None else tuple(state.shape)


def streamed(module: LearnerModule, *, skip_frozen: bool, form: Form = "merged") -> list[Streamed]:
    """What the stream holds, in order. Tied weights once, under the name of their first owner (the input embedding).

    skip_frozen: only what training changes. Merged, these are all weights of a module whose parts an engine may have
    fused (attention, MLP, all experts) as soon as one of them has an adapter: engines take such layers whole.

    Raises ValueError for an adapter on a matrix that two modules share: the other one would get it too.
    """
    named = [(name, p) for name, p in module.named_parameters() if ".lora_" not in name]
    layers = list(lora_layers(module))
    if not layers:
        return [plain(module.hf_name(n), p) for n, p in named if p.requires_grad or not skip_frozen]
    _check_ties(module, layers)
    if form == "apart":
        whole = [plain(_base_name(module, n), p) for n, p in named if p.requires_grad or not skip_frozen]
        return [*whole, *(tensor for path, layer in layers for tensor in _apart(module, path, layer))]
    owners = {id(base_weight(layer)): layer for _, layer in layers}
    moving = {_unit(_base_name(module, f"{path}.weight")) for path, _ in layers}
    found: list[Streamed] = []
    for name, parameter in named:
        called, layer = _base_name(module, name), owners.get(id(parameter))
        if layer is not None:
            factors = _factors(layer).values()
            found.append(Streamed(called, (parameter, *factors), partial(_merged, layer, parameter)))
        elif parameter.requires_grad or not skip_frozen or _unit(called) in moving:
            found.append(plain(called, parameter))
    return found


def plain(name: str, parameter: nn.Parameter) -> Streamed:
    """A parameter as it is; of 4-bit weights, what they stand for."""
    return Streamed(name, (parameter,), lambda whole: _dequantised(parameter, whole[0]))


def is_apart(name: str) -> bool:
    """Whether a tensor of the stream is a part of an adapter."""
    return name.startswith(PEFT_PREFIX)


def lora_layers(module: LearnerModule) -> Iterator[tuple[str, Any]]:
    """Path and layer of every module that has an adapter."""
    if not hasattr(module.model, "peft_config"):
        return
    from peft.tuners.lora.layer import LoraLayer

    for path, layer in module.named_modules():
        if isinstance(layer, LoraLayer):
            yield path, layer


def base_weight(layer: Any) -> nn.Parameter:
    """The parameter that the adapter of a layer is added to."""
    return layer.get_param() if hasattr(layer, "parameter_name") else layer.get_base_layer().weight


def _factors(layer: Any) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if name.startswith("lora_")}


class _Merge(nn.Module):
    """What a weight becomes with its adapter, as a function of the weight and the factors."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, weight: Tensor) -> Tensor:
        variant = self.layer.lora_variant.get(ADAPTER)
        if variant is None:
            return weight + self.layer.get_delta_weight(ADAPTER)
        return variant.merge_safe(self.layer, ADAPTER, weight)


def _merged(layer: Any, parameter: nn.Parameter, whole: Sequence[Tensor]) -> Tensor:
    """The weight with its adapter, computed in float32 and rounded once; nothing that the model holds changes."""
    with torch.no_grad():
        weight = _dequantised(parameter, whole[0].detach())
        exact = weight.float()
        here = next(name for name, p in layer.named_parameters() if p is parameter)
        factors = {name: t.detach().float() for name, t in zip(_factors(layer), whole[1:], strict=True)}
        given = {f"layer.{name}": tensor for name, tensor in {here: exact, **factors}.items()}
        return functional_call(_Merge(layer), given, (exact,)).to(weight.dtype)


def _dequantised(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return tensor
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(tensor, state)


def _apart(module: LearnerModule, path: str, layer: Any) -> Iterator[Streamed]:
    assert ADAPTER not in layer.lora_variant, "an engine knows plain adapters only"
    scale = layer.scaling[ADAPTER]
    for name, parameter in _factors(layer).items():
        called = PEFT_PREFIX + peft_name(module.hf_name(f"{path}.{name}"))
        second = name.startswith(("lora_B", "lora_embedding_B"))
        yield Streamed(called, (parameter,), partial(_scaled, scale)) if second else plain(called, parameter)


def _scaled(scale: float, whole: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return (whole[0].detach().float() * scale).to(whole[0].dtype)


def peft_name(name: str) -> str:
    """A parameter's name without that of the adapter, which files do not hold."""
    return name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


def _base_name(module: LearnerModule, name: str) -> str:
    return module.hf_name(name).replace(BASE, "")


def _unit(name: str) -> str:
    """The module that an engine may have fused this weight in, by its path: all experts, else the module around it."""
    before, experts, _ = name.partition(EXPERTS)
    if experts:
        return before + experts
    module = name.rpartition(".")[0]
    return module.rpartition(".")[0] or module


def _check_ties(module: LearnerModule, layers: Sequence[tuple[str, Any]]) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(_base_name(module, name))
    wearers = Counter(id(base_weight(layer)) for _, layer in layers)
    for path, layer in layers:
        shared = names[id(base_weight(layer))]
        if len(shared) > 1 or wearers[id(base_weight(layer))] > 1:
            module_name = _base_name(module, f"{path}.weight").removesuffix(".weight")
            raise ValueError(
                f"`ds.lora.target_modules` puts an adapter on {module_name!r}, whose matrix other modules use too "
                f"({', '.join(shared)}); the engines would give it to all of them: leave {module_name!r} out"
            )
