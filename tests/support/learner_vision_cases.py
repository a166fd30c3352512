"""Cases with images, run by `learner_ranks`: ranks and micro-batches of which some have no image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from openrlhf.core.batch import Batch
from openrlhf.learner.config import ModelConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import LearnerSpec
from support.learner_ranks import Case
from support.learner_step_cases import OBJECTIVE, capture_gradients, make_spec, share
from support.vision_batches import image_batch, probe_of

IMAGES = ((0, 1), (), (2,), (4,), (), (3,), (), (5, 1))
"""Of eight samples, by number: two, none, one, ... of three sizes."""
WITHOUT = [1, 4, 6]
EVEN = [0, 1, 2, 3]
SUPPRESSED = (3, 4, 5, 6)

BUDGET = 40
"""Tokens of a micro-batch in the layouts with `dynamic` in their name."""

# name -> (stage, micro_batch_size, rows of rank 0 when there are two ranks)
LAYOUTS: dict[str, tuple[int, int, list[int]]] = {
    "stage2": (2, 8, EVEN),
    "stage3": (3, 8, EVEN),
    "stage3-micro1": (3, 1, [0, 1, 2, 3, 4]),
    "stage2-rank0-without": (2, 2, WITHOUT),
    "stage3-rank0-without": (3, 2, WITHOUT),
    "stage3-checkpointing-rank0-without": (3, 8, WITHOUT),
    "stage2-rank0-idle": (2, 3, []),
    "stage3-rank0-idle": (3, 3, []),
    "stage2-dynamic": (2, 1, EVEN),
    "stage3-dynamic-rank0-without": (3, 1, WITHOUT),
    "stage2-frozen": (2, 2, WITHOUT),
    "stage3-frozen": (3, 2, WITHOUT),
}
FAMILIES = ("qwen3_vl", "llava")
RUNS = [("qwen3_vl", name) for name in LAYOUTS] + [("llava", "stage2-rank0-without"), ("llava", "stage3-rank0-without")]


def policy_batch(family: str) -> Batch:
    """`image_batch` with the numbers that `OBJECTIVE` reads."""
    batch = image_batch(family, IMAGES)
    generator = torch.Generator().manual_seed(7)
    first, second, third = (torch.randn(batch.tokens.shape, generator=generator) * batch.action_mask for _ in range(3))
    return batch.with_(
        advantages=first,
        old_logprobs=(-5.5 + 0.3 * second) * batch.action_mask,
        ref_logprobs=(-5.5 + 0.3 * third) * batch.action_mask,
    )


def vision_spec(folder: Path, family: str, name: str, stage: int, micro: int) -> LearnerSpec:
    spec = make_spec(folder, model=family, stage=stage, micro=micro, suppressed_token_ids=SUPPRESSED[:3])
    return replace(
        spec,
        batch=replace(spec.batch, dynamic_batch_enable="dynamic" in name, max_tokens_per_gpu=BUDGET),
        score_micro_batch_size=min(micro, 3),
        freeze_visual_encoder="frozen" in name,
        model=ModelConfig(gradient_checkpointing_enable="checkpointing" in name),
    )


def images_one_by_one(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """What the layouts have to equal: unpartitioned, sample by sample, no probe."""
    results = {}
    for family in FAMILIES:
        batch = policy_batch(family)
        for name in ("trained", "frozen"):
            learner = Learner(vision_spec(folder, family, name, 0, 1))
            gradients = capture_gradients(learner)
            scores = learner.score(batch).logprobs
            metrics = learner.update(batch, OBJECTIVE)
            results[family, name] = {"metrics": metrics, "gradients": gradients, "scores": scores}
    return results


def images_mixed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Scores, metrics and gradients of the same step under every layout."""
    results = {}
    for family, name in RUNS:
        stage, micro, rows = LAYOUTS[name]
        learner = Learner(vision_spec(folder, family, name, stage, micro))
        learner.image_probe = probe_of(image_batch(family, [(2,)]))
        gradients = capture_gradients(learner)
        own = share(policy_batch(family), rows, rank, world)
        scores = learner.score(own).logprobs
        metrics = learner.update(own, OBJECTIVE)
        results[family, name] = {
            "metrics": metrics,
            "gradients": gradients,
            "scores": dict(zip(own.index.tolist(), scores if scores is not None else (), strict=True)),
        }
    return results


CASES: dict[str, Case] = {"images_one_by_one": images_one_by_one, "images_mixed": images_mixed}
