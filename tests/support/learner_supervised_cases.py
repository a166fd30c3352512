"""Cases about supervised and preference objectives and about adapters, run by `learner_ranks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openrlhf.core.batch import Batch
from openrlhf.learner.config import LoraConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import Objective
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.supervised_objectives import PreferenceObjective, RewardObjective, SftObjective
from support.learner_lora_cases import live
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_step_cases import HUGE, capture_gradients, make_spec, share

OBJECTIVES: dict[str, tuple[Role, Objective]] = {
    "sft": (Role.POLICY, SftObjective()),
    "rm": (Role.REWARD, RewardObjective()),
    "dpo": (Role.POLICY, PreferenceObjective(beta=0.2, label_smoothing=0.1, nll_loss_coef=0.3)),
    "ipo": (Role.POLICY, PreferenceObjective(beta=0.2, ipo=True)),
}

# name -> (stage, micro_batch_size, packed, token budget or None)
LAYOUTS: dict[str, tuple[int, int, bool, int | None]] = {
    "whole": (2, 8, False, None),
    "micro1": (2, 1, False, None),
    "stage3-micro3": (3, 3, False, None),
    "packed": (1, 2, True, None),
    "dynamic": (2, 1, True, 45),
}
ROWS = [0, 1, 2, 3, 6, 7]
"""Rows of rank 0 out of 8 when there are two ranks: three pairs, and one for the other rank."""


def pair_batch() -> Batch:
    """Four pairs with margins, every answer with at least one trained token."""
    batch = make_batch()
    actions = batch.action_mask.clone()
    actions[:, 4] = True
    noise = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(3))
    margins = torch.tensor([0.0, 0.5, -0.2, 1.0]).repeat_interleave(2)
    return batch.with_(
        action_mask=actions,
        ref_logprobs=(-4.85 + 0.3 * noise) * actions,
        index=torch.arange(4).repeat_interleave(2),
        margins=margins,
    )


def _spec(folder: Path, name: str, layout: tuple[int, int, bool, int | None]) -> LearnerSpec:
    stage, micro, packed, budget = layout
    spec = make_spec(folder, stage=stage, micro=micro, role=OBJECTIVES[name][0])
    return replace(
        spec,
        ds=replace(spec.ds, packing_samples=packed),
        batch=replace(spec.batch, dynamic_batch_enable=budget is not None, max_tokens_per_gpu=budget or HUGE),
    )


def supervised_layouts(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Metrics and gradients of the same step under every layout, and the evaluation of the same batch before it."""
    results: dict[str, Any] = {}
    for name, (_, objective) in OBJECTIVES.items():
        for layout in LAYOUTS:
            if layout != "whole" and name == "ipo":
                continue
            learner = Learner(_spec(folder, name, LAYOUTS[layout]))
            batch = share(pair_batch(), ROWS, rank, world)
            evaluation = learner.evaluate(batch, objective)
            gradients = capture_gradients(learner)
            metrics = learner.update(batch, objective)
            results[f"{name}-{layout}"] = {"metrics": metrics, "gradients": gradients, "evaluation": evaluation}
    return results


def idle_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A rank without pairs evaluates and trains along."""
    results = {}
    for name, (_, objective) in OBJECTIVES.items():
        learner = Learner(_spec(folder, name, LAYOUTS["stage3-micro3"]))
        batch = share(pair_batch(), list(range(8)), rank, world)
        results[name] = learner.evaluate(batch, objective), learner.update(batch, objective)["grad_norm"]
    return results


def adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Two steps with adapters: what moved, and what is exported."""
    results: dict[str, Any] = {}
    for name, stage in (("sft", 2), ("rm", 3)):
        spec = _spec(folder, name, (stage, 2, False, None))
        lora = LoraConfig(rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "up_proj"))
        learner = Learner(replace(spec, ds=replace(spec.ds, lora=lora)))
        before = live(learner)
        batch = share(pair_batch(), ROWS, rank, world)
        for _ in range(2):
            learner.update(batch, OBJECTIVES[name][1])
        learner.set_reward_statistics(0.5, 2.0)
        learner.export_hf(str(folder / f"adapter-{name}-{world}"))
        after = live(learner)
        results[name] = {
            "moved": sorted(n for n in before if not torch.equal(before[n], after[n])),
            "scores": learner.score(pair_batch()),
        }
    return results


CASES: dict[str, Case] = {
    "supervised_layouts": supervised_layouts,
    "idle_rank": idle_rank,
    "adapters": adapters,
}
