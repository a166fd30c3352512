"""Cases that measure what `plan` predicts, run by `learner_ranks`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from openrlhf.core.config import PolicyLossConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import PolicyObjective
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_step_cases import make_spec, share

OBJECTIVE = PolicyObjective(config=PolicyLossConfig(), kl_coef=0.0)
STAGES = (0, 2, 3)


def held_bytes() -> int:
    """Bytes of all tensors in this process, each storage once."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    tensors += [t.ds_tensor for t in tensors if hasattr(t, "ds_tensor")]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def step_memory(rank: int, world: int, folder: Path) -> dict[int, int]:
    """Bytes of parameters, gradients and optimiser states just before the second optimiser step, by ZeRO stage."""
    batch = share(make_batch(), [0, 1, 2, 3], rank, world)
    return {stage: _measure(make_spec(folder, stage=stage, model="quickstart"), batch) for stage in STAGES}


def _measure(spec: Any, batch: Any) -> int:
    before = held_bytes()
    learner = Learner(spec)
    learner.update(batch, OBJECTIVE)
    engine, found = learner._engine, []
    take_step = engine.step

    def step() -> tuple[bool, float]:
        found.append(held_bytes() - before)
        return take_step()

    engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
    learner.update(batch, OBJECTIVE)
    return found[-1]


CASES: dict[str, Case] = {"step_memory": step_memory}
