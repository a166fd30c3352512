"""Cases about what outlives a step: checkpoints, averages, exports, the weight stream, Muon; run by `learner_ranks`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.core.config import PolicyLossConfig
from openrlhf.learner.config import AdamConfig, MuonConfig, OptimConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import PolicyObjective, ValueObjective
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch
from support.learner_ranks import Case, result_file, wait_for
from support.learner_step_cases import capture_gradients, make_spec, parameters, share

OBJECTIVE = PolicyObjective(config=PolicyLossConfig())
ROWS = [0, 1, 2, 3, 4]
MATRIX = "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def muon_config(max_norm: float = 1.0) -> OptimConfig:
    return OptimConfig(
        optim="muon",
        muon=MuonConfig(lr=0.02, momentum=0.95),
        adam=AdamConfig(lr=1e-3),
        lr_scheduler="constant",
        lr_warmup_ratio=0.0,
        max_norm=max_norm,
    )


def _train(learner: Learner, first: int, last: int, rank: int, world: int) -> list[Any]:
    objective = ValueObjective() if learner.spec.role is Role.CRITIC else OBJECTIVE
    seen = []
    for step in range(first, last):
        noise = torch.rand(1).item()  # a consumer of the random state
        metrics = learner.update(share(make_batch(seed=step), ROWS, rank, world), objective)
        seen.append((noise, metrics))
    return seen


def _resume_spec(folder: Path, optim: str, stage: int, role: Role, make: Callable[..., LearnerSpec]) -> LearnerSpec:
    spec = make(folder, stage=stage, micro=3, role=role)
    assert spec.optim is not None
    config = muon_config() if optim == "muon" else spec.optim
    return replace(
        spec,
        optim=replace(config, lr_scheduler="cosine_with_min_lr", lr_warmup_ratio=0.2),
        max_optimizer_steps=8,
        batch=replace(spec.batch, enable_ema=True, ema_beta=0.5),
    )


def resume_one(
    rank: int,
    world: int,
    folder: Path,
    *,
    optim: str,
    stage: int,
    role: Role,
    make: Callable[..., LearnerSpec] = make_spec,
    name: str = "ckpt",
) -> dict[str, Any]:
    """Train 2 + 2 steps, once in one go and once through a checkpoint into an engine that went elsewhere before.

    rank, world: whose samples; ranks of one tensor-parallel group have the same.
    """
    spec = _resume_spec(folder, optim, stage, role, make)
    path = folder / f"{name}-{optim}-{stage}-{role}-{dist.get_world_size()}"
    straight = Learner(spec)
    _train(straight, 0, 2, rank, world)
    straight.save_checkpoint(str(path))
    want = _train(straight, 2, 4, rank, world)
    want_weights, want_ema = parameters(straight), straight.ema.full_state() if straight.ema else None
    resumed = Learner(spec)
    _train(resumed, 5, 6, rank, world)
    resumed.load_checkpoint(str(path))
    got = _train(resumed, 2, 4, rank, world)
    got_weights, got_ema = parameters(resumed), resumed.ema.full_state() if resumed.ema else None
    return {
        "metrics": got == want,
        "weights": _equal(got_weights, want_weights),
        "ema": _equal(got_ema or {}, want_ema or {}) and (dist.get_rank() > 0 or bool(got_ema)),
        "steps": resumed.optimizer_steps,
        "lr": [metrics["lr"][0] for _, metrics in got],
    }


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def resume(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One of each optimiser, one critic; over different stages."""
    cases = [("adam", 2, Role.POLICY), ("muon", 3, Role.POLICY), ("adam", 3, Role.CRITIC)]
    return {f"{o}-{s}-{r}": resume_one(rank, world, folder, optim=o, stage=s, role=r) for o, s, r in cases}


def resume_all(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Every optimiser, stage and trained role."""
    return {
        f"{optim}-{stage}-{role}": resume_one(rank, world, folder, optim=optim, stage=stage, role=role)
        for optim in ("adam", "muon")
        for stage in (0, 1, 2, 3)
        for role in (Role.POLICY, Role.CRITIC)
    }


def refusals(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Loading what does not fit says so."""
    learner = Learner(make_spec(folder, stage=1))
    learner.save_checkpoint(str(folder / "small"))
    messages = {}
    spec = make_spec(folder, stage=1)
    for name, other, path in (
        ("nothing", spec, folder / "nowhere"),
        ("stage", make_spec(folder, stage=2), folder / "small"),
        ("universal", replace(spec, ds=replace(spec.ds, use_universal_ckpt=True)), folder / "small"),
        ("ema", replace(spec, batch=replace(spec.batch, enable_ema=True)), folder / "small"),
    ):
        try:
            Learner(other).load_checkpoint(str(path))
        except ValueError as error:
            messages[name] = str(error)
    return messages


def weights_only(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A learner that starts from another's export: no steps, no moments, the schedule from its beginning."""
    spec = make_spec(folder, stage=2)
    assert spec.optim is not None
    spec = replace(spec, optim=replace(spec.optim, lr_scheduler="linear", lr_warmup_ratio=0.5), max_optimizer_steps=8)
    trained = Learner(spec)
    before = [m["lr"][0] for _, m in _train(trained, 0, 2, rank, world)]
    trained.export_hf(str(folder / "weights-only"))
    fresh = Learner(replace(spec, model_path=str(folder / "weights-only")))
    backend: Any = fresh._engine
    moments = len(backend.ds_engine.basic_optimizer.state)
    steps, weights = fresh.optimizer_steps, _equal(parameters(fresh), parameters(trained))
    after = [m["lr"][0] for _, m in _train(fresh, 2, 4, rank, world)]
    return {"before": before, "after": after, "steps": steps, "moments": moments, "weights": weights}


def save_for_other_world(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Train two steps, save, convert; then the next steps' metrics, to compare at another world size."""
    from openrlhf.learner.universal import main

    results = {}
    for stage in (0, 2, 3):
        learner = Learner(make_spec(folder, stage=stage))
        _train(learner, 0, 2, rank, world)
        learner.save_checkpoint(str(folder / f"universal{stage}"))
        if rank == 0 and stage > 0:
            main([str(folder / f"universal{stage}")])
        dist.barrier()
        results[f"stage{stage}"] = [metrics for _, metrics in _train(learner, 2, 4, rank, world)]
    return results


UNIVERSAL_LOADS = [(2, 1), (2, 2), (3, 3), (0, 0)]
"""(stage that wrote, stage that loads)."""


def load_at_other_world(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The second step after loading shows that the moments came along too."""
    wait_for(result_file(folder, "save_for_other_world", 2, 0))
    results: dict[str, Any] = {"refused": {}}

    def load(written: int, stage: int, *, universal: bool) -> Learner:
        spec = make_spec(folder, stage=stage)
        learner = Learner(replace(spec, ds=replace(spec.ds, use_universal_ckpt=universal)))
        learner.load_checkpoint(str(folder / f"universal{written}"))
        return learner

    for written, stage in UNIVERSAL_LOADS:
        learner = load(written, stage, universal=True)
        metrics = [metrics for _, metrics in _train(learner, 2, 4, rank, world)]
        results[f"{written}-{stage}"] = {"metrics": metrics, "steps": learner.optimizer_steps}
    results["unconverted"] = load(0, 0, universal=False).optimizer_steps
    for written, stage, universal in ((3, 3, False), (2, 3, True), (3, 2, True), (2, 0, True), (0, 2, True)):
        try:
            load(written, stage, universal=universal)
        except ValueError as error:
            results["refused"][written, stage] = str(error)
    return results


def averages(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Weights after every step, and the averages of a whole and a partitioned model."""
    results = {}
    for stage in (1, 3):
        spec = make_spec(folder, stage=stage)
        learner = Learner(replace(spec, batch=replace(spec.batch, enable_ema=True, ema_beta=0.75)))
        history = [parameters(learner)]
        for step in range(3):
            _train(learner, step, step + 1, rank, world)
            history.append(parameters(learner))
        assert learner.ema is not None
        results[f"stage{stage}"] = {"history": history, "ema": learner.ema.full_state()}
        learner.export_hf(str(folder / f"ema-export-{stage}"))
    return results


def following(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Stages of policy and reference and alpha -> how far the reference is from where it should be, and after a resume.

    The reference scores before every move: ZeRO-3 then keeps its small parameters whole.
    """
    batch = make_batch()
    results: dict[str, Any] = {}
    for stage, own_stage in ((2, 3), (3, 0), (3, 3)):
        optim = OptimConfig(lr_scheduler="constant", lr_warmup_ratio=0.0, adam=AdamConfig(lr=1e-2))
        policy = Learner(make_spec(folder, stage=stage, optim=optim))
        policy.update(share(batch, [0, 1, 2], rank, world), OBJECTIVE)
        target = parameters(policy)
        for alpha in (1.0, 0.3):
            spec = make_spec(folder, stage=own_stage, role=Role.REFERENCE, optim=None, follow_alpha=alpha)
            reference, resumed = Learner(spec), Learner(spec)
            assert reference.following is not None
            assert resumed.following is not None
            first = parameters(reference)
            times = 1 if alpha == 1 else 3
            for _ in range(times):
                reference.score(batch)
                count, stream = policy.model_buckets(20_000, wanted=True)
                buckets = []
                for bucket in stream:
                    assert torch.is_grad_enabled(), "who asks for buckets now and then trains between them"
                    buckets.append([(name, tensor.clone()) for name, tensor in bucket])
                assert len(buckets) == count > 3
                for bucket in buckets:
                    reference.following.take(bucket)
            scores = reference.score(batch).logprobs
            resumed.score(batch)
            saved = folder / f"following-{stage}-{own_stage}-{alpha}"
            reference.following.save(saved)
            dist.barrier()
            resumed.following.load(saved)
            resumed_scores, want = resumed.score(batch).logprobs, policy.score(batch).logprobs
            assert scores is not None
            assert resumed_scores is not None
            assert want is not None
            now, left = parameters(reference), (1 - alpha) ** times
            results[f"{stage}, {own_stage}, {alpha}"] = {
                "kl": float((scores - want).abs().max()),
                "moved": max(float((target[n] - first[n]).abs().max()) for n in target),
                "weights": max(float((now[n] - target[n] - left * (first[n] - target[n])).abs().max()) for n in target),
                "resumed": _equal(parameters(resumed), now) and torch.equal(resumed_scores, scores),
            }
    return results


def exports(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Train a step, stream and export: tied, untied, GPT-2; whole and partitioned."""
    results = {}
    for model in ("qwen3", "untied", "gpt2"):
        for stage in (2, 3):
            learner = Learner(make_spec(folder, stage=stage, model=model))
            learner.update(share(make_batch(), ROWS, rank, world), OBJECTIVE)
            path = str(folder / f"export-{model}-{stage}")
            learner.export_hf(path)
            batch = make_batch(3, seed=9)
            sizes = [sum(t.numel() * 4 for _, t in b) for b in learner.named_parameter_buckets(20_000)]
            results[f"{model}-{stage}"] = {
                "path": path,
                "stream": parameters(learner),
                "metadata": [(i.name, i.shape, i.dtype) for i in learner.weight_metadata()],
                "bucket_bytes": sizes,
                "logprobs": learner.score(batch, with_entropy=True),
            }
    return results


def everywhere(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The weight stream where rank 0 alone wants it and where all ranks do."""

    def stream(learner: Learner, *, wanted: bool) -> dict[str, Tensor]:
        buckets = learner.named_parameter_buckets(20_000, wanted=wanted)
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}

    results = {}
    for stage in (2, 3):
        learner = Learner(make_spec(folder, stage=stage))
        results[f"stage-{stage}"] = {
            "alone": stream(learner, wanted=rank == 0),
            "everywhere": stream(learner, wanted=True),
        }
    return results


def frozen(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Reference scores, whole, offloaded and partitioned; a reference refuses to train."""
    results: dict[str, Any] = {}
    for name, stage, offload in (("whole", 2, False), ("offloaded", 2, True), ("partitioned", 3, False)):
        spec = replace(make_spec(folder, stage=stage, role=Role.REFERENCE), optim=None, offload=offload)
        learner = Learner(spec)
        rows = [0, 1, 2, 3, 4] if rank == 0 else [5]  # different micro-batch counts
        results[name] = learner.score(make_batch().select(rows)).logprobs
        results[f"{name}-idle"] = learner.score(make_batch().select([] if rank else [1])).logprobs
    try:
        learner.update(make_batch(), OBJECTIVE)
    except ValueError as error:
        results["error"] = str(error)
    return results


def sleeping(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Sleep and wake between steps change nothing."""
    spec = make_spec(folder, stage=2)
    awake, sleeper = Learner(spec), Learner(replace(spec, ds=replace(spec.ds, enable_sleep=True)))
    want = _train(awake, 0, 2, rank, world)
    got = _train(sleeper, 0, 1, rank, world)
    sleeper.sleep()
    sleeper.wake()
    got += _train(sleeper, 1, 2, rank, world)
    return {"metrics": [m for _, m in want] == [m for _, m in got]}


def muon(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One step of Muon on every stage: gradient, change of the weights, and calls of Newton-Schulz."""
    from deepspeed.runtime.zero.muon import original_muon

    calls: list[tuple[int, ...]] = []
    orthogonalise = original_muon.zeropower_via_gram_newtonschulz

    def spy(matrix: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple(matrix.shape))
        return orthogonalise(matrix, *args, **kwargs)

    original_muon.zeropower_via_gram_newtonschulz = spy
    results = {}
    try:
        for stage in (0, 1, 2, 3):
            for max_norm in (0.0, 100.0, 0.05):
                calls.clear()
                learner = Learner(replace(make_spec(folder, stage=stage, micro=3), optim=muon_config(max_norm)))
                found, gradients, history, norms = capture_gradients(learner), [], [parameters(learner)], []
                for step in range(2):
                    norms += [m["grad_norm"][0] for _, m in _train(learner, step, step + 1, rank, world)]
                    gradients.append({n: found[n].clone() for n in (MATRIX, EMBEDDING)})
                    history.append(parameters(learner))
                results[stage, max_norm] = {
                    "gradients": gradients,
                    "changes": [{n: b[n] - a[n] for n in a} for a, b in itertools.pairwise(history)],
                    "norms": norms,
                    "calls": list(calls),
                }
    finally:
        original_muon.zeropower_via_gram_newtonschulz = orthogonalise
    return results


CASES: dict[str, Case] = {
    "resume": resume,
    "resume_all": resume_all,
    "refusals": refusals,
    "weights_only": weights_only,
    "save_for_other_world": save_for_other_world,
    "load_at_other_world": load_at_other_world,
    "averages": averages,
    "following": following,
    "exports": exports,
    "everywhere": everywhere,
    "frozen": frozen,
    "sleeping": sleeping,
    "muon": muon,
}
