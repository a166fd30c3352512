"""`TrainingEngine`: what a `Learner` asks of the backend that holds its model and its optimiser.

The backend of every run is DeepSpeed (`zero/`). Another one is an object with these methods and a function that makes
it from a spec, which `ds.backend` names. A backend decides how parameters, gradients and optimiser states are
spread over ranks; what is computed from a batch, and when, is the learner's affair.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.learner.modules import LearnerModule, Readings
from openrlhf.learner.packing import ModelInputs
from openrlhf.learner.spec import LearnerSpec


class TrainingEngine(Protocol):
    """One rank of a model. Methods are collective over the ranks of the role unless they say so."""

    @property
    def module(self) -> LearnerModule:
        """The model. Its parameters may be in parts: whole shapes and values come from `full_shape` and `whole`."""
        ...

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that are given samples of their own, over which gradients are averaged; None: all of them."""
        ...

    @property
    def waits_in_forward(self) -> bool:
        """Whether a forward pass waits for the other ranks, so that all of them make the same number."""
        ...

    # -- steps

    def on_device(self) -> AbstractContextManager[None]:
        """Inside, a model that is kept in host memory between calls is on the device. Not collective."""
        ...

    def check_batch(self, batch: Batch) -> None:
        """AssertionError where ranks that hold one model together were given different samples."""

    def forward(self, inputs: ModelInputs, **options: Any) -> Readings:
        """Call the module (options: its own). Collective where `waits_in_forward`."""
        ...

    def learning_rate(self) -> float:
        """Rate of the first parameter group for the next step. Not collective."""
        ...

    def update(self, micro_batches: int, loss: Callable[[int], Tensor]) -> tuple[bool, float]:
        """One optimiser step on the sum of `loss(0)`, `loss(1)`, ...: a forward pass each, made when its turn comes.

        Gradients are averaged over `data_group`. With a non-finite gradient no rank takes the step, and the schedule
        does not move. Returns whether it was taken, and the gradient norm before clipping.
        """
        ...

    def sleep(self) -> None:
        """Move training states to host memory; weights stay where they are. Twice is harmless."""

    def wake(self) -> None:
        """Bring back what `sleep` moved. Must run before the next `update`."""

    # -- whole tensors and their parts

    def full_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Shape of the whole parameter. Not collective."""
        ...

    def whole(self, groups: Iterable[Sequence[nn.Parameter]], *, wanted: bool) -> Iterator[list[Tensor]]:
        """The whole tensors of one group of parameters after the other; empty lists on ranks that do not want them.

        Every rank must exhaust it. A tensor may be the live parameter: it must not be changed, and is valid until the
        next group is asked for. Where nobody needs a copy none is made.
        """
        ...

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        """What this rank holds of a parameter that the ranks hold once together; None: others hold it all.

        Not collective.
        """
        ...

    def join(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor | None:
        """The whole tensor in host memory, made of what every rank has in place of its `part`; on rank 0, else None."""
        ...

    def cut(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor: the inverse of `join`. Not collective."""
        ...

    def held(self, parameter: nn.Parameter) -> Tensor:
        """What this rank holds of a parameter, in the form that `cut` gives; not to be changed. Not collective."""
        ...

    def put(self, parameter: nn.Parameter, part: Tensor) -> None:
        """Replace what this rank holds of a frozen parameter. Every rank has to, by itself, with its `cut`."""

    # -- checkpoints

    def layout(self) -> dict[str, Any]:
        """What saved states depend on, by name: small values, the same on every rank. Not collective."""
        ...

    def save(self, folder: Path) -> None:
        """Write parameters, optimiser states and schedule below `folder`."""

    def load(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Restore them. saved: the `layout` that was written, and `world_size`.

        Raises ValueError when they do not fit, with the way out.
        """


BuildEngine = Callable[[LearnerSpec, torch.device], TrainingEngine]
"""Loads the model of a spec and makes it ready to be called and, where the spec has an optimiser, trained. Collective.

Raises ValueError for options that the backend would ignore or that would give wrong numbers.
"""


def load_backend(name: str) -> BuildEngine:
    """The function that `ds.backend` names. Raises ValueError where there is none."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"`ds.backend` {name!r}: no such module:function: {error}") from error
