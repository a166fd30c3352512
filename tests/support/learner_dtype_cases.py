"""Cases about number formats on real DeepSpeed engines, run by `learner_ranks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import ValueObjective
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero import engine
from openrlhf.learner.zero.config import deepspeed_config
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_step_cases import make_spec


def _bf16(folder: Path, stage: int, **changes: Any) -> LearnerSpec:
    spec = make_spec(folder, stage=stage, **changes)
    return replace(spec, ds=replace(spec.ds, param_dtype="bf16"))


def wrapper(rank: int, world: int, folder: Path) -> str:
    """What an engine says that DeepSpeed wrapped in another class, although the specification let it through."""

    def wide(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return deepspeed_config(*args, **kwargs) | {"data_types": {"grad_accum_dtype": "fp32"}}

    with mock.patch.object(engine, "deepspeed_config", wide):
        Learner(_bf16(folder, 2))  # the class that is known
        try:
            Learner(_bf16(folder, 1))
        except ValueError as error:
            return str(error)
    return ""


def bf16_critic(rank: int, world: int, folder: Path) -> dict[int, Any]:
    """Values before and after a step in bf16 on every stage, the step's metrics, and the exported head."""
    found = {}
    batch = make_batch(8)
    for stage in range(4):
        learner = Learner(_bf16(folder, stage, role=Role.CRITIC))
        before = learner.score(batch).values
        assert before is not None
        metrics = learner.update(batch.with_(values=before, returns=torch.ones_like(before)), ValueObjective())
        after = learner.score(batch).values
        checkpoint, export = folder / f"bf16-{stage}", folder / f"bf16-export-{stage}"
        checkpoint.mkdir()
        learner.save_checkpoint(str(checkpoint))
        learner.export_hf(str(export))
        other = Learner(_bf16(folder, stage, role=Role.CRITIC))
        other.load_checkpoint(str(checkpoint))
        resumed = other.score(batch).values
        head = load_file(export / "model.safetensors")["score.weight"]
        found[stage] = {"before": before, "after": after, "resumed": resumed, "metrics": metrics, "head": head}
    return found


CASES: dict[str, Case] = {"wrapper": wrapper, "bf16_critic": bf16_critic}
