"""Pushes of adapters from real trainer ranks into engine workers, over each backend; run by `learner_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from openrlhf.learner.config import LoraConfig
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_step_cases import share
from support.transport_cases import BACKENDS, BUCKET, OBJECTIVE, run


def adapters(backend: str, stage: int) -> Case:
    """A push of the model with its adapter, and one of the adapter alone after an optimiser step."""

    def case(rank: int, world: int, folder: Path) -> dict[str, Any]:
        lora = LoraConfig(rank=2, alpha=6, target_modules=("q_proj", "v_proj", "up_proj"))
        with run(rank, world, folder, backend, stage=stage, model="untied", lora=lora) as own:
            own.connect()
            whole = own.actor.plan.nbytes
            found: dict[str, Any] = {"different": []}
            for own.skip_frozen in (False, True):
                own.actor.plan_push(BUCKET, own.skip_frozen, own.form)
                own.learner.update(share(make_batch(), [0, 1, 2, 3], rank, world), OBJECTIVE)
                own.push()
                stream = own.learner.named_parameter_buckets(BUCKET, skip_frozen=True, form="apart")
                wanted = {name: tensor.clone() for bucket in stream for name, tensor in bucket}
                found["different"] += own.differences()
                for made in [] if own.engines is None else own.engines.workers:
                    assert made.adapter.keys() == wanted.keys()
                    found["different"] += [name for name in wanted if not torch.equal(made.adapter[name], wanted[name])]
            return found | {
                "bytes": (whole, own.actor.plan.nbytes),
                "moved": any(bool(t.any()) for t in wanted.values()),
            }

    return case


CASES: dict[str, Case] = {
    f"adapter-{backend}-{stage}": adapters(backend, stage) for backend in BACKENDS for stage in range(4)
}
