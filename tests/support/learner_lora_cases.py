"""Cases about adapters in the weight stream, run by `learner_ranks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.learner.config import LoraConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.lora_stream import Form
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_step_cases import OBJECTIVE, make_spec, share

ROWS = [0, 1, 2, 3, 4]
TARGETS = ("q_proj", "v_proj", "up_proj")
"""Of the layers that an engine fuses only some."""
MODELS: dict[str, tuple[str, ...]] = {"qwen3": TARGETS, "untied": ("all-linear",), "gpt2": ("c_attn", "c_proj")}


def streamed(learner: Learner, *, skip_frozen: bool, form: Form = "merged") -> dict[str, Tensor]:
    """Cloned: a tensor of the stream is valid until the next bucket."""
    buckets = learner.named_parameter_buckets(20_000, skip_frozen=skip_frozen, form=form)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def live(learner: Learner) -> dict[str, Tensor]:
    """The parameters as the model holds them."""
    _, buckets = learner.model_buckets(1 << 30, wanted=True)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def lora_streams(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Both forms of the stream of models that trained for a step, with their adapters as a folder."""
    results: dict[str, Any] = {}
    for model, targets in MODELS.items():
        for stage in (0, 2, 3):
            spec = make_spec(folder, stage=stage, model=model)
            lora = LoraConfig(rank=4, alpha=12, target_modules=targets)
            learner = Learner(replace(spec, ds=replace(spec.ds, lora=lora)))
            for _ in range(2):  # the second factor starts at 0, so the first moves from the second step on
                learner.update(share(make_batch(), ROWS, rank, world), OBJECTIVE)
            path = str(folder / f"lora-{model}-{stage}-{world}")
            learner.export_hf(path)
            before = live(learner)
            results[f"{model}-{stage}"] = {
                "path": path,
                "whole": streamed(learner, skip_frozen=False),
                "moving": streamed(learner, skip_frozen=True),
                "apart": streamed(learner, skip_frozen=True, form="apart"),
                "apart_whole": sorted(streamed(learner, skip_frozen=False, form="apart")),
                "metadata": [(i.name, i.shape, i.dtype) for i in learner.weight_metadata()],
                "apart_metadata": [(i.name, i.shape) for i in learner.weight_metadata(skip_frozen=True, form="apart")],
                "unchanged": all(torch.equal(before[name], tensor) for name, tensor in live(learner).items()),
                "logprobs": learner.score(make_batch(3, seed=9)).logprobs,
            }
    return results


CASES: dict[str, Case] = {"lora_streams": lora_streams}
