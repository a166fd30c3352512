"""Rows that are cut over the ranks of a sequence group take the steps of one rank; run by `learner_ranks`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.config import PolicyLossConfig
from openrlhf.learner.config import AdamConfig, LoraConfig, ModelConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import Objective, ValueObjective
from openrlhf.learner.sequence_parallel.group import SequenceGroup
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero import engine as zero_engine
from support.learner_models import make_batch
from support.learner_ranks import Case
from support.learner_sharing_cases import AUX, sharing_config
from support.learner_state_cases import muon_config, resume_one
from support.learner_step_cases import HUGE, OBJECTIVE, capture_gradients, make_spec, parameters
from support.learner_supervised_cases import OBJECTIVES, pair_batch

STEPS = 2
EPSILON = 1e-3
"""Of Adam: far above the rounding of a gradient, which would decide about the step of a weight that has none."""


@dataclass(frozen=True)
class Setup:
    """A model, what it learns, and how. groups: how many sequence groups there are. idle: the second has no samples."""

    model: str = "grouped"
    task: str = "policy"
    stage: int = 2
    micro: int = 8
    budget: int | None = None
    stride: int = 1
    groups: int = 1
    idle: bool = False
    lora: int = 0
    checkpointing: bool = False
    reentrant: bool = False
    muon: bool = False
    overlap: bool = False

    @property
    def alone(self) -> Setup:
        """What one rank does for comparison."""
        return Setup(self.model, self.task, stage=0, lora=self.lora, muon=self.muon)


SETUPS: dict[str, Setup] = {
    "heads": Setup(),
    "tokens": Setup("one_key", stage=3, checkpointing=True),
    "window-tokens": Setup("one_key_window", micro=3),
    "mixture": Setup("mixture", stage=1),
    "norms": Setup("norms", stage=0, stride=2, micro=2),
    "critic": Setup("tied", "critic", stage=3, budget=30),
    "dpo": Setup("qwen3", "dpo", micro=1, checkpointing=True),
    "rm": Setup("grouped", "rm", stage=3),
    "lora": Setup("grouped", "sft", lora=4),
}

MODELS = ("grouped", "tied", "window", "mixture", "norms", "qwen3", "one_key", "one_key_window")
PROOF_SETUPS: dict[str, Setup] = {
    f"{model}-stage{stage}": Setup(model, stage=stage, checkpointing=stage == 3)
    for number, model in enumerate(MODELS)
    for stage in (number % 4, (number + 1 + number // 4) % 4)
} | {
    f"{task}-stage{stage}": Setup("tied" if stage == 2 else "one_key", task, stage=stage, micro=micro, budget=budget)
    for task in ("critic", "sft", "rm", "dpo", "ipo")
    for stage, micro, budget in ((2, 1, None), (3, 8, 20))
}
PROOF_SETUPS |= {
    "stride2": Setup("one_key", stride=2),
    "micro1": Setup("window", micro=1),
    "dynamic": Setup("norms", budget=16),
    "checkpointing": Setup("qwen3", checkpointing=True, stage=1),
    "reentrant": Setup("one_key", checkpointing=True, reentrant=True),
    "reentrant-stage3": Setup("grouped", checkpointing=True, reentrant=True, stage=3),
    "overlap": Setup("grouped", overlap=True),
    "muon-stage2": Setup("grouped", muon=True),
    "muon-stage3": Setup("one_key", muon=True, stage=3),
    "lora-stage2": Setup("grouped", "sft", lora=4),
    "lora-stage3": Setup("one_key", "dpo", lora=4, stage=3),
}
GROUPS_SETUPS: dict[str, Setup] = {
    f"groups-{name}": replace(SETUPS[name], groups=2, micro=2) for name in SETUPS if name != "mixture"
}
GROUPS_SETUPS |= {f"idle-{name}": replace(GROUPS_SETUPS[f"groups-{name}"], idle=True) for name in ("tokens", "rm")}
"""Two groups of two ranks. The balance loss of a mixture is a matter of the micro-batch."""


def save_sequence_models(path: Path) -> None:
    """Models with fewer key heads than a group has ranks."""
    from transformers import AutoModelForCausalLM

    for name in ("grouped", "window"):
        config = sharing_config(name)
        config.num_key_value_heads = 1
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(path / {"grouped": "one_key", "window": "one_key_window"}[name])


def sequence_spec(folder: Path, setup: Setup, size: int) -> LearnerSpec:
    role, _ = task_of(setup)
    aux = AUX if setup.model == "mixture" else 0.0
    spec = make_spec(folder, stage=setup.stage, micro=setup.micro, role=role, model=setup.model, aux_loss_coef=aux)
    assert spec.optim is not None
    adam = replace(spec.optim, adam=AdamConfig(lr=1e-3, eps=EPSILON))
    muon = replace(muon_config(), adam=adam.adam)
    lora = LoraConfig(rank=setup.lora, alpha=8) if setup.lora else LoraConfig()
    ring = {"ring_attn_size": size, "ring_attn_head_stride": setup.stride if size > 1 else 1}
    dynamic = {"dynamic_batch_enable": setup.budget is not None, "max_tokens_per_gpu": setup.budget or HUGE}
    return replace(
        spec,
        ds=replace(spec.ds, packing_samples=True, lora=lora, overlap_comm=setup.overlap, **ring),
        optim=muon if setup.muon else adam,
        batch=replace(spec.batch, enable_ema=True, ema_beta=0.5, **dynamic),
        model=ModelConfig(
            gradient_checkpointing_enable=setup.checkpointing, gradient_checkpointing_reentrant=setup.reentrant
        ),
    )


def task_of(setup: Setup) -> tuple[Role, Objective]:
    if setup.task == "policy":
        aux = AUX if setup.model == "mixture" else 0.0
        return Role.POLICY, replace(OBJECTIVE, config=PolicyLossConfig(entropy_coef=0.01, aux_loss_coef=aux))
    return (Role.CRITIC, ValueObjective()) if setup.task == "critic" else OBJECTIVES[setup.task]


def _rows(batch: Batch, setup: Setup, group: int) -> Batch:
    """Of two groups the first has six rows or all."""
    if setup.groups == 1:
        return batch
    if setup.idle:
        return batch.select(list(range(batch.size)) if group == 0 else [])
    return batch.select([0, 1, 2, 3, 6, 7] if group == 0 else [4, 5])


def take_steps(folder: Path, setup: Setup, size: int, rank: int) -> dict[str, Any]:
    """Scores before, metrics of every step, gradients of the first, weights and their average afterwards."""
    learner, objective = Learner(sequence_spec(folder, setup, size)), task_of(setup)[1]
    batches = [make_batch(seed=seed) for seed in range(STEPS)]
    if objective.rows_per_unit > 1 or setup.task == "sft":
        batches = [pair_batch()] * STEPS
    whole = batches[0]
    batches = [_rows(batch, setup, rank // size) for batch in batches]
    scores = learner.score(whole, with_entropy=learner.spec.role.is_language_model)
    gradients = capture_gradients(learner)
    metrics = [learner.update(batches[0], objective)]
    first = dict(gradients)
    metrics += [learner.update(batch, objective) for batch in batches[1:]]
    assert learner.ema is not None
    return {
        "scores": {n: t for n in ("logprobs", "entropy", "values", "rewards") if (t := getattr(scores, n)) is not None},
        "metrics": metrics,
        "gradients": first,
        "weights": parameters(learner),
        "average": learner.ema.full_state(),
    }


def check_same(got: Mapping[str, Any], want: Mapping[str, Any], *, task: str) -> None:
    """Everything within 1e-6, of the largest number of a tensor where that is above 1.

    Loss and gradients of IPO are within 4e-6: it squares sums of log-probs in float32, and on one rank, too, other
    micro-batches change its loss by 2.6e-6 and its gradients by 2.0e-6.
    """
    relative = 4e-6 if task == "ipo" else 1e-6
    for name in ("scores", "gradients", "weights", "average"):
        if name == "average" and not got[name]:
            continue  # rank 0 has it
        assert got[name].keys() == want[name].keys()
        for key, tensor in want[name].items():
            assert _largest(got[name][key] - tensor) < relative * max(1.0, _largest(tensor)), f"{name} {key}"
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, (total, count) in theirs.items():
            assert ours[name][1] == count, name
            if name == "value_clip_ratio":
                continue  # of a value within the range its two losses are compared, which are equal but for rounding
            assert ours[name][0] / count == pytest.approx(total / count, rel=relative, abs=1e-6), name


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def steps_case(setups: Mapping[str, Setup]) -> Case:
    def case(rank: int, world: int, folder: Path) -> dict[str, Any]:
        """Name -> outcome on this rank; with one rank what is expected of `Setup.alone`."""
        if world == 1:
            return {
                str(setup): take_steps(folder, setup, 1, 0) for setup in dict.fromkeys(s.alone for s in setups.values())
            }
        return {name: take_steps(folder, setup, world // setup.groups, rank) for name, setup in setups.items()}

    return case


def sequence_resume(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Resumed through a checkpoint, and a step from it on ranks that have whole rows."""
    setup = Setup("one_key", stage=2)
    make = lambda folder, **changes: sequence_spec(folder, replace(setup, stage=changes["stage"]), world)  # noqa: E731
    found = resume_one(0, 1, folder, optim="adam", stage=2, role=Role.POLICY, make=make, name="ring")
    learners = [Learner(sequence_spec(folder, setup, size)) for size in (world, 1)]
    learners[0].save_checkpoint(str(folder / "ring-size"))
    learners[1].load_checkpoint(str(folder / "ring-size"))
    batch = make_batch(seed=7)
    learners[0].update(batch, OBJECTIVE)
    learners[1].update(batch.select(list(range(rank, batch.size, world))), OBJECTIVE)
    (want, got) = (parameters(learner) for learner in learners)
    return {"resumed": found, "difference at size 1": max(_largest(got[n] - want[n]) for n in want)}


def sequence_mistakes(rank: int, world: int, folder: Path) -> dict[str, str]:
    """What is wrong with samples, ranks, kernels and models, in words."""
    spec = sequence_spec(folder, Setup("qwen3"), world)
    learner = Learner(spec)
    build = zero_engine.build_engine

    def deaf(module: Any) -> None:
        layer = module.backbone.layers[1].self_attn
        forward = layer.forward
        layer.forward = lambda *args, attend=None, **options: forward(*args, **options)  # noqa: PLW0108

    def counting(module: Any) -> None:
        forward = module.backbone.forward
        module.backbone.forward = lambda *args, position_ids, attend=None, **options: forward(
            *args, position_ids=position_ids if attend is None else 2 * position_ids, attend=attend, **options
        )

    def changed(change: Any) -> Any:
        def made(*args: Any) -> Any:
            engine = build(*args)
            change(engine.module)
            return engine

        return patch("openrlhf.learner.zero.engine.build_engine", made)

    tries: dict[str, tuple[Any, Any]] = {
        "samples": (nullcontext(), lambda: learner.update(make_batch().select([rank]), OBJECTIVE)),
        "world": (nullcontext(), lambda: SequenceGroup.of(world + 1)),
        "eager": (nullcontext(), lambda: Learner(replace(spec, ds=replace(spec.ds, attn_implementation="eager")))),
        "positions": (changed(counting), lambda: Learner(spec)),
        "deaf": (changed(deaf), lambda: Learner(spec)),
    }
    messages = {}
    for name, (context, attempt) in tries.items():
        try:
            with context:
                attempt()
        except (AssertionError, ValueError) as error:
            messages[name] = str(error)
    return messages


CASES: dict[str, Case] = {
    "sequence_steps": steps_case(SETUPS),
    "sequence_proof": steps_case(PROOF_SETUPS),
    "sequence_groups": steps_case(GROUPS_SETUPS),
    "sequence_resume": sequence_resume,
    "sequence_mistakes": sequence_mistakes,
}
