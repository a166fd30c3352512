"""Measures what `plan` predicts: the bytes that a learner rank holds between micro-batches and inside a step."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.config import PolicyLossConfig
from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import PolicyObjective
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch
from support.learner_ranks import Case

OBJECTIVE = PolicyObjective(config=PolicyLossConfig(), detach_old=True)
STAGES = (0, 1, 2, 3)


def living_tensors() -> list[Tensor]:
    """All tensors of this process, gradients too."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return tensors + [t.grad for t in tensors if t.is_leaf and t.grad is not None]


def new_bytes(old: list[Tensor]) -> int:
    """Bytes of the tensors that are not `old`, each storage once. The caller keeps `old` alive."""
    known = {t.untyped_storage().data_ptr() for t in old}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in living_tensors()}
    return sum(size for place, size in sizes.items() if place not in known)


def held_memory(rank: int, world: int, folder: Path) -> dict[int, dict[str, int]]:
    """ZeRO stage -> moment of the second step -> bytes of parameters, gradients and optimiser states."""
    return {stage: _measure(folder / "quickstart", stage) for stage in STAGES}


LORA = LoraConfig(rank=8)


def held_with_adapters(rank: int, world: int, folder: Path) -> dict[int, dict[str, int]]:
    """The same of a model with adapters."""
    return {stage: _measure(folder / "quickstart", stage, LORA) for stage in STAGES}


def _measure(model: Path, stage: int, lora: LoraConfig | None = None) -> dict[str, int]:
    batch = make_batch()
    # A number format for sums of gradients, even the same one, has them reduced after every micro-batch as on GPUs.
    sums = "fp32" if stage == 2 else None
    old = living_tensors()
    learner = Learner(
        LearnerSpec(
            role=Role.POLICY,
            model_path=str(model),
            ds=DsConfig(
                zero_stage=stage,
                param_dtype="fp32",
                grad_accum_dtype=sums,
                attn_implementation="sdpa",
                lora=lora or LoraConfig(),
            ),
            optim=OptimConfig(lr_scheduler="constant"),
            batch=TrainBatchConfig(micro_batch_size=3),
            max_optimizer_steps=10,
        )
    )
    learner.update(batch, OBJECTIVE)
    held: dict[str, int] = {}

    engine: Any = learner._engine
    optimizer = engine.ds_engine.basic_optimizer
    backward, step = engine.ds_engine.backward, optimizer.step

    def backward_then_measure(loss: Tensor, **options: Any) -> None:
        backward(loss, **options)
        held.setdefault("training", new_bytes(old))  # after the first of several micro-batches

    def measure_then_step(*args: Any, **kwargs: Any) -> Any:
        held["optimizer_step"] = new_bytes(old)
        return step(*args, **kwargs)

    engine.ds_engine.backward, optimizer.step = backward_then_measure, measure_then_step
    learner.update(batch, OBJECTIVE)
    return held


CASES: dict[str, Case] = {"held_memory": held_memory, "held_with_adapters": held_with_adapters}
