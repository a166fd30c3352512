"""What a weight push brings of an adapter: kept back from the model, put together and checked.

An adapter is named tensors like all others in a push, under peft's names (`wire.is_adapter`). The trainer has put its
scale into the second factor, so an engine that is told a scale of 1 can neither forget it nor apply it twice. Plain
torch; what vLLM does with it is in `adapter.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from openrlhf.rollout.weights.wire import ADAPTER_PREFIX, is_adapter

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"


class AdapterParts:
    """What has come so far. Stands between a receiver and `load_weights` of its model."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._modules: frozenset[str] = frozenset()

    def begin(self, *, with_base: bool) -> None:
        """A push begins. with_base: it brings the model too, in which case an adapter on other modules may follow."""
        self._tensors = {}
        if with_base:
            self._shapes, self._modules = {}, frozenset()

    def load(self, model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Let the model load what belongs to it, and keep the rest."""
        base = self._without_adapter(weights)
        first = next(base, None)
        if first is not None:
            model.load_weights(itertools.chain([first], base))

    def take(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        """The whole adapter by peft's names, and the modules that it is on.

        Raises ValueError where it is not whole, is on other modules than the one before, or does not fit the weights
        that came.
        """
        tensors, self._tensors = self._tensors, {}
        plain = {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in tensors.items()}
        modules = frozenset(name.removesuffix(FIRST).removesuffix(SECOND) for name in plain)
        if not modules:
            raise ValueError("a push brought no adapter to an engine that serves one")
        if self._modules and modules != self._modules:
            changed = sorted(modules ^ self._modules)
            raise ValueError(f"a push brought an adapter on other modules than the one before: {changed[0]} and others")
        for module in modules:
            self._check(module, plain.get(module + FIRST), plain.get(module + SECOND))
        self._modules = modules
        return tensors, modules

    def _without_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if is_adapter(name):
                self._tensors[name] = tensor.to("cpu", copy=True)
            else:
                self._shapes[name] = tuple(tensor.shape)
                yield name, tensor

    def _check(self, module: str, first: Tensor | None, second: Tensor | None) -> None:
        if first is None or second is None:
            missing = "first" if first is None else "second"
            raise ValueError(f"the adapter of {module} came without its {missing} factor")
        weight = self._shapes.get(f"{module}.weight")
        whole = (second.shape[0], first.shape[1])
        if first.shape[0] != second.shape[1] or weight not in (whole, whole[::-1]):
            raise ValueError(
                f"the adapter of {module} is {tuple(second.shape)} times {tuple(first.shape)}, its weight "
                + ("never came" if weight is None else f"is {weight}")
            )


class ModelWithAdapter:
    """Stands in for the model where a receiver of vLLM loads what it got."""

    def __init__(self, model: Any, parts: AdapterParts) -> None:
        self._model, self._parts = model, parts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._parts.load(self._model, weights)
