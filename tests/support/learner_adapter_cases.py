"""Cases with adapters: the base as the reference, resuming, other numbers of ranks; run by `learner_ranks`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.core.config import Truncation
from openrlhf.learner.config import AdamConfig, LoraConfig, ModelConfig, OptimConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import ValueObjective
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch
from support.learner_ranks import Case, result_file, wait_for
from support.learner_sharing_cases import sharing_batch
from support.learner_state_cases import resume_one
from support.learner_step_cases import OBJECTIVE, capture_gradients, make_spec, share

LORA = LoraConfig(rank=4, alpha=6)
FAST = OptimConfig(lr_scheduler="constant", lr_warmup_ratio=0.0, adam=AdamConfig(lr=1e-2, weight_decay=0.1))
ROWS = [0, 1, 2, 4, 7]
"""Of rank 0, where there are two."""


def with_adapters(folder: Path, *, lora: LoraConfig = LORA, **changes: Any) -> LearnerSpec:
    spec = make_spec(folder, **changes)
    return replace(spec, ds=replace(spec.ds, lora=lora)) if spec.trained else spec


def raw(learner: Learner) -> dict[str, torch.Tensor]:
    """All parameters as they are, adapters beside their base."""
    _, stream = learner.model_buckets(50_000, wanted=True)
    return {name: tensor.clone() for bucket in stream for name, tensor in bucket}


def reference(rank: int, world: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Stage and sharing -> how far the base's log-probs are from those of a frozen copy, before training and after."""
    results: dict[str, dict[str, Any]] = {}
    batch = share(sharing_batch(), ROWS, rank, world)
    for stage in (0, 2, 3):
        for sharing in ("off", "on"):
            spec = with_adapters(folder, stage=stage, model="tied", optim=FAST, score_micro_batch_size=5)
            spec = replace(spec, batch=replace(spec.batch, share_prompt=sharing))
            policy, frozen = Learner(spec), Learner(replace(spec, role=Role.REFERENCE, optim=None))
            assert policy.shares_prompt is frozen.shares_prompt is (sharing == "on")
            want, first, start = frozen.score(batch).logprobs, policy.score(batch).logprobs, raw(policy)
            assert want is not None
            assert first is not None
            apart = [float((first - want).abs().max())]
            moved = 0.0
            for _ in range(3):
                policy.update(batch, OBJECTIVE)
                own = policy.score(batch).logprobs
                with policy.base():
                    got = policy.score(batch).logprobs
                assert got is not None
                assert own is not None
                apart.append(float((got - want).abs().max()))
                moved = float((own - want).abs().max())
            now = raw(policy)
            results[f"{stage}-{sharing}"] = {
                "apart": apart,
                "moved": moved,
                "changed": sorted(name for name in now if not torch.equal(now[name], start[name])),
                "adapters": sorted(name for name in now if ".lora_" in name),
            }
    return results


def checkpointing(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Stage and kind of gradient checkpointing -> gradients of the first step in which all adapters have one."""
    results = {}
    batch = share(sharing_batch(), ROWS, rank, world)
    for stage in (2, 3):
        for kind in ("none", "plain", "reentrant"):
            model = ModelConfig(
                gradient_checkpointing_enable=kind != "none", gradient_checkpointing_reentrant=kind == "reentrant"
            )
            spec = with_adapters(folder, stage=stage, micro=4, model="qwen3", optim=FAST)
            learner = Learner(replace(spec, model=model))
            learner.update(batch, OBJECTIVE)
            gradients = capture_gradients(learner)
            learner.update(batch, OBJECTIVE)
            results[f"{stage}-{kind}"] = gradients
    return results


def resume_adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Policy and critic, over stages, with dropout, whose masks are part of the random state."""
    make = partial(with_adapters, lora=replace(LORA, dropout=0.1))
    cases = [(0, Role.CRITIC), (2, Role.POLICY), (3, Role.POLICY), (3, Role.CRITIC)]
    return {
        f"{stage}-{role}": resume_one(
            rank, world, folder, optim="adam", stage=stage, role=role, make=make, name="adapters"
        )
        for stage, role in cases
    }


KINDS = {
    "plain": LORA,
    "rslora": replace(LORA, rslora=True),
    "dora": replace(LORA, dora=True, target_modules=("q_proj", "up_proj")),
}


def trained(folder: Path, rank: int, world: int, *, role: Role = Role.POLICY, **changes: Any) -> Learner:
    """After two steps, with an average."""
    spec = with_adapters(folder, role=role, optim=FAST, **changes)
    learner = Learner(replace(spec, batch=replace(spec.batch, enable_ema=True, ema_beta=0.5)))
    objective = ValueObjective() if role is Role.CRITIC else OBJECTIVE
    for step in range(2):
        learner.update(share(make_batch(seed=step), [0, 1, 2, 3, 4], rank, world), objective)
    return learner


def export_adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Kind and stage -> scores and averages of what was exported as an adapter and merged."""
    results: dict[str, Any] = {}
    for kind, lora in KINDS.items():
        for stage in (2, 3) if kind == "plain" else (2,):
            learner = trained(folder, rank, world, stage=stage, lora=lora)
            path = folder / f"adapter-{kind}-{stage}"
            learner.export_hf(str(path))
            learner.spec = replace(learner.spec, ds=replace(learner.spec.ds, lora=replace(lora, save_merged=True)))
            learner.export_hf(f"{path}-merged")
            assert learner.ema is not None
            results[f"{kind}-{stage}"] = {
                "logprobs": learner.score(make_batch(3, seed=9)).logprobs,
                "adapters": sum(".lora_" in name for name in raw(learner)),
                "ema": learner.ema.full_state(),
            }
    critic = trained(folder, rank, world, role=Role.CRITIC, stage=3)
    critic.export_hf(str(folder / "adapter-critic"))
    results["critic"] = {"values": critic.score(make_batch(3, seed=9)).values}
    return results


def save_adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint that fits other numbers of ranks, and the metrics of the steps that follow."""
    from openrlhf.learner.universal import main

    results = {}
    for stage in (2, 3):
        learner = trained(folder, rank, world, stage=stage)
        path = folder / f"universal-adapters-{stage}"
        learner.save_checkpoint(str(path))
        dist.barrier()
        size = sum(file.stat().st_size for file in (path / "deepspeed").iterdir())
        if rank == 0:
            main([str(path)])
        dist.barrier()
        results[f"stage{stage}"] = {"bytes": size, "metrics": following_steps(learner, rank, world)}
    return results


def following_steps(learner: Learner, rank: int, world: int) -> list[Any]:
    return [
        learner.update(share(make_batch(seed=step), [0, 1, 2, 3, 4], rank, world), OBJECTIVE) for step in range(2, 4)
    ]


def load_adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The same steps with one rank instead of two; and what does not fit."""
    wait_for(result_file(folder, "lora_save", 2, 0))
    results: dict[str, Any] = {}

    def load(stage: int, lora: LoraConfig = LORA) -> Learner:
        spec = with_adapters(folder, stage=stage, optim=FAST, lora=lora)
        ds = replace(spec.ds, use_universal_ckpt=True)
        learner = Learner(replace(spec, ds=ds, batch=replace(spec.batch, enable_ema=True, ema_beta=0.5)))
        learner.load_checkpoint(str(folder / f"universal-adapters-{stage}"))
        return learner

    for stage in (2, 3):
        learner = load(stage)
        results[f"stage{stage}"] = {"steps": learner.optimizer_steps, "metrics": following_steps(learner, rank, world)}
    for name, changed in (("rank", {"rank": 8}), ("alpha", {"alpha": 7}), ("targets", {"target_modules": ("q_proj",)})):
        try:
            load(2, replace(LORA, **changed))
        except ValueError as error:
            results[name] = str(error)
    return results


def other_references(rank: int, world: int, folder: Path) -> dict[str, dict[str, float]]:
    """Kind -> how far the base's log-probs are from a frozen copy's, and two scores of the policy from each other.

    With dropout, DoRA, rsLoRA, in bf16, and over the tokens that a truncated distribution kept.
    """
    results = {}
    batch = share(sharing_batch(), ROWS, rank, world)
    others = {kind: lora for kind, lora in KINDS.items() if kind != "plain"}
    kinds = {**others, "dropout": replace(LORA, dropout=0.5), "truncated": LORA, "bf16": LORA}
    for kind, lora in kinds.items():
        spec = with_adapters(folder, stage=2, model="tied", optim=FAST, lora=lora, score_micro_batch_size=5)
        if kind == "truncated":
            spec = replace(spec, truncation=Truncation(top_k=5))
        if kind == "bf16":
            spec = replace(spec, ds=replace(spec.ds, param_dtype="bf16"))
        policy, frozen = Learner(spec), Learner(replace(spec, role=Role.REFERENCE, optim=None))
        for _ in range(2):
            policy.update(batch, OBJECTIVE)
        first, again = policy.score(batch), policy.score(batch)
        given = batch if first.kept is None else batch.with_(kept=first.kept)
        with policy.base():
            got = policy.score(given).logprobs
        want = frozen.score(given).logprobs
        assert got is not None
        assert want is not None
        assert first.logprobs is not None
        assert again.logprobs is not None
        results[kind] = {
            "apart": float((got - want).abs().max()),
            "moved": float((first.logprobs - want).abs().max()),
            "repeated": float((first.logprobs - again.logprobs).abs().max()),
        }
    return results


CASES: dict[str, Case] = {
    "lora_reference": reference,
    "lora_other_references": other_references,
    "lora_checkpointing": checkpointing,
    "lora_resume": resume_adapters,
    "lora_exports": export_adapters,
    "lora_save": save_adapters,
    "lora_load": load_adapters,
}
