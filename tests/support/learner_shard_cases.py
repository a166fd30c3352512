"""Cases with tensor parallelism, in groups of two ranks; run by `learner_ranks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_state_cases import resume_one
from support.learner_step_cases import (
    OBJECTIVE,
    Layout,
    capture_gradients,
    check_adam_step,
    laid_out,
    make_spec,
    parameters,
    share,
)

SIZE = 2

# name -> (stage, micro_batch_size, packed, token budget or None, rows of the first group out of 8)
SHARD_LAYOUTS: dict[str, Layout] = {
    "stage0": (0, 8, False, None, [0, 1, 2, 3]),
    "stage1-micro3": (1, 3, False, None, [0, 1, 2, 3]),
    "stage2": (2, 8, False, None, [0, 1, 2, 3]),
    "stage2-packed": (2, 2, True, None, [0, 1, 2, 3, 4]),
    "stage2-dynamic": (2, 1, False, 40, [0, 1, 2, 3]),
    "stage1-idle-group": (1, 8, False, None, []),
    "stage2-checkpointing": (2, 4, False, None, [0, 1, 2, 3]),
}


def shard_spec(folder: Path, **changes: Any) -> LearnerSpec:
    spec = make_spec(folder, **changes)
    return replace(spec, ds=replace(spec.ds, tensor_parallel_size=SIZE))


def check_step(by_rank: list[dict[str, Any]], want: dict[str, Any], layout: str) -> None:
    """Metrics, whole gradients and new weights of every rank against those of one rank without shards."""
    for outcome in (of_rank[layout] for of_rank in by_rank):
        for name in ("policy_loss", "kl", "entropy_loss", "grad_norm"):
            got, expected = outcome["metrics"][name], want["metrics"][name]
            assert got[0] / got[1] == pytest.approx(expected[0] / expected[1], rel=1e-6, abs=1e-6), name
        assert largest_difference(outcome["gradients"], want["gradients"]) < 1e-6
        check_adam_step(outcome["weights"], want)


def largest_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max()) for n in want)


def shard_layouts(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Metrics, whole gradients and new weights of the same step under every layout."""
    results = {}
    for name, layout in SHARD_LAYOUTS.items():
        learner, rows = Learner(laid_out(shard_spec(folder), name, layout)), layout[-1]
        gradients = capture_gradients(learner)
        metrics = learner.update(share(make_batch(), rows, rank // SIZE, world // SIZE), OBJECTIVE)
        cut = [n for n, p in learner.module.named_parameters() if p.shape != torch.Size(_full(learner, n))]
        results[name] = {"metrics": metrics, "gradients": gradients, "weights": parameters(learner), "cut": cut}
    return results


def _full(learner: Learner, name: str) -> tuple[int, ...]:
    return next(i.shape for i in learner.weight_metadata() if i.name == learner.module.hf_name(name))


def shard_exports(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Train a step, stream and export: policies with and without a tied head, and a critic; then a reference."""
    results: dict[str, Any] = {}
    for model, role in (("qwen3", Role.POLICY), ("untied", Role.POLICY)):
        spec = shard_spec(folder, stage=2, model=model, role=role)
        learner = Learner(replace(spec, batch=replace(spec.batch, enable_ema=True, ema_beta=0.5)))
        before = parameters(learner)
        learner.update(share(make_batch(), [0, 1, 2], rank // SIZE, world // SIZE), OBJECTIVE)
        path = str(folder / f"shard-export-{model}")
        learner.export_hf(path)
        results[model] = {
            "path": path,
            "before": before,
            "stream": parameters(learner),
            "metadata": [(i.name, i.shape, i.dtype) for i in learner.weight_metadata()],
            "logprobs": learner.score(make_batch(3, seed=9), with_entropy=True),
        }
    for offload in (False, True):
        spec = replace(shard_spec(folder, stage=2, role=Role.REFERENCE), optim=None, offload=offload)
        results[f"reference-{offload}"] = Learner(spec).score(make_batch()).logprobs
    return results


def shard_resume(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Resumed is the same as never stopped, for shards too."""
    return {
        f"{stage}-{role}": resume_one(
            rank // SIZE, world // SIZE, folder, optim="adam", stage=stage, role=role, make=shard_spec
        )
        for stage, role in ((0, Role.POLICY), (2, Role.CRITIC))
    }


def shard_mistakes(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Different samples within a group."""
    learner = Learner(shard_spec(folder, stage=2))
    try:
        learner.update(make_batch().select([rank]), OBJECTIVE)
    except AssertionError as error:
        return {"samples": str(error)}
    return {}


CASES: dict[str, Case] = {
    "shard_layouts": shard_layouts,
    "shard_exports": shard_exports,
    "shard_resume": shard_resume,
    "shard_mistakes": shard_mistakes,
}
