"""A learner's backend in plain PyTorch: one process, whole parameters, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.learner.engine import TrainingEngine
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule, Readings
from openrlhf.learner.packing import ModelInputs
from openrlhf.learner.schedule import build_schedule
from openrlhf.learner.spec import LearnerSpec

FILE = "plain.pt"


class PlainEngine:
    """Without a spec that trains: a module whose whole tensors are asked for."""

    data_group = None
    waits_in_forward = False

    def __init__(self, module: LearnerModule, spec: LearnerSpec | None = None) -> None:
        self.module = module
        self.asleep = False
        self._device = next(module.parameters()).device
        self._trained = [p for p in module.parameters() if p.requires_grad]
        optim = None if spec is None else spec.optim
        if spec is not None and optim is not None:
            adam = optim.adam
            self._max_norm = optim.max_norm or float("inf")
            self._optimizer = torch.optim.AdamW(
                self._trained, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay
            )
            self._schedule = build_schedule(self._optimizer, optim, spec.max_optimizer_steps)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        yield

    def check_batch(self, batch: Batch) -> None: ...

    def forward(self, inputs: ModelInputs, **options: Any) -> Readings:
        return self.module(inputs, **options)

    def learning_rate(self) -> float:
        return float(self._schedule.get_last_lr()[0])

    def update(self, micro_batches: int, loss: Callable[[int], Tensor]) -> tuple[bool, float]:
        assert not self.asleep, "wake() comes before update()"
        for number in range(micro_batches):
            loss(number).backward()
        norm = float(nn.utils.clip_grad_norm_(self._trained, self._max_norm))
        finite = norm < float("inf")
        if finite:
            self._optimizer.step()
            self._schedule.step()
        self._optimizer.zero_grad()
        return finite, norm

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def full_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def whole(self, groups: Iterable[Sequence[nn.Parameter]], *, wanted: bool) -> Iterator[list[Tensor]]:
        for group in groups:
            yield [p.data for p in group] if wanted else []

    def part(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.detach()

    def join(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor | None:
        return None if part is None else part.to("cpu", copy=True)

    def cut(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        return whole

    def held(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def put(self, parameter: nn.Parameter, part: Tensor) -> None:
        parameter.data.copy_(part)

    def layout(self) -> dict[str, Any]:
        return {"backend": "plain"}

    def save(self, folder: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self._states().items()}, folder / FILE)

    def load(self, folder: Path, saved: Mapping[str, Any]) -> None:
        if saved.get("backend") != "plain":
            raise ValueError(f"the checkpoint {str(folder)!r} is one of another backend")
        states = torch.load(folder / FILE, map_location=self._device)
        for name, part in self._states().items():
            part.load_state_dict(states[name])

    def _states(self) -> dict[str, Any]:
        return {"module": self.module, "optimizer": self._optimizer, "schedule": self._schedule}


def build_plain(spec: LearnerSpec, device: torch.device) -> TrainingEngine:
    """A `BuildEngine` for roles of one rank."""
    assert not dist.is_initialized() or dist.get_world_size() == 1, "a role has one rank here"
    return PlainEngine(load_module(spec, device), spec)
