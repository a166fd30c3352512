"""Cases about one optimiser step, run by `learner_ranks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.config import AdvantageConfig, PolicyLossConfig, Truncation
from openrlhf.core.tables import POLICY_LOSSES
from openrlhf.learner.config import AdamConfig, DsConfig, ModelConfig, OptimConfig, TrainBatchConfig
from openrlhf.learner.heads import TokenDistribution
from openrlhf.learner.learner import Learner, NonFiniteStepError
from openrlhf.learner.objective import PolicyObjective, ValueObjective
from openrlhf.learner.spec import LearnerSpec, Role
from support.adam_step import check_first_step
from support.learner_models import make_batch
from support.learner_ranks import Case

OBJECTIVE = PolicyObjective(config=PolicyLossConfig(entropy_coef=0.01), kl_coef=0.1, kl_estimator="k3")
HUGE = 10**6

Layout = tuple[int, int, bool, int | None, list[int]]

# name -> (stage, micro_batch_size, packed, token budget or None, rows of rank 0 out of 8 when there are two ranks)
LAYOUTS: dict[str, Layout] = {
    "stage0": (0, 8, False, None, [0, 1, 2, 3]),
    "stage1": (1, 8, False, None, [0, 1, 2, 3]),
    "stage2": (2, 8, False, None, [0, 1, 2, 3]),
    "stage3": (3, 8, False, None, [0, 1, 2, 3]),
    "stage2-micro1": (2, 1, False, None, [0, 1, 2, 3]),
    "stage3-micro3": (3, 3, False, None, [0, 1, 2, 3]),
    "stage0-micro2-packed": (0, 2, True, None, [0, 1, 2, 3]),
    "stage2-packed": (2, 8, True, None, [0, 1, 2, 3]),
    "stage3-dynamic": (3, 1, True, 40, [0, 1, 2, 3]),
    "stage2-dynamic-padded": (2, 1, False, 40, [0, 1, 2, 3]),
    "stage2-uneven": (2, 1, False, None, [0, 1, 2, 3, 4, 5]),
    "stage3-uneven": (3, 2, False, None, [0, 1, 2, 3, 4, 5]),
    "stage1-rank1-idle": (1, 3, False, None, [0, 1, 2, 3, 4, 5, 6, 7]),
    "stage3-rank0-idle": (3, 3, False, None, []),
    "stage2-checkpointing": (2, 4, False, None, [0, 1, 2, 3]),
    "stage3-checkpointing": (3, 4, False, None, [0, 1, 2, 3]),
}


def make_spec(folder: Path, *, stage: int = 2, micro: int = 8, role: Role = Role.POLICY, **changes: Any) -> LearnerSpec:
    spec = LearnerSpec(
        role=role,
        model_path=str(folder / changes.pop("model", "qwen3")),
        ds=DsConfig(zero_stage=stage, param_dtype="fp32", attn_implementation="sdpa"),
        optim=OptimConfig(lr_scheduler="constant", lr_warmup_ratio=0.0, adam=AdamConfig(lr=1e-3), max_norm=0.5),
        batch=TrainBatchConfig(micro_batch_size=micro),
        max_optimizer_steps=100,
        score_micro_batch_size=3,
    )
    return replace(spec, **changes)


def capture_gradients(learner: Learner) -> dict[str, Tensor]:
    """Record the full gradients just before the optimiser (filled when the next step is taken)."""
    from deepspeed.utils import safe_get_full_grad

    engine: Any = learner._engine
    found: dict[str, Tensor] = {}
    take_step = engine.step

    def step() -> tuple[bool, float]:
        for name, p in learner.module.named_parameters():
            gradient = p.grad if learner.spec.ds.zero_stage == 0 else safe_get_full_grad(p)
            if gradient is not None:
                found[learner.module.hf_name(name)] = engine.shards.whole(p, gradient.detach().clone())
        return take_step()

    engine.step = step
    return found


def share(batch: Batch, rows_of_rank0: list[int], rank: int, world: int) -> Batch:
    if world == 1:
        return batch
    return batch.select(rows_of_rank0 if rank == 0 else [r for r in range(batch.size) if r not in rows_of_rank0])


def parameters(learner: Learner) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for bucket in learner.named_parameter_buckets(20_000):
        found.update((name, tensor.clone()) for name, tensor in bucket)
    return found


def laid_out(spec: LearnerSpec, name: str, layout: Layout) -> LearnerSpec:
    """The spec of one row of a table of layouts."""
    stage, micro, packed, budget, _ = layout
    dynamic = {"dynamic_batch_enable": budget is not None, "max_tokens_per_gpu": budget or HUGE}
    return replace(
        spec,
        ds=replace(spec.ds, zero_stage=stage, packing_samples=packed),
        batch=replace(spec.batch, micro_batch_size=micro, **dynamic),
        model=ModelConfig(gradient_checkpointing_enable="checkpointing" in name),
    )


def layouts(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Metrics, gradients and new weights of the same step under every layout."""
    results = {}
    for name, layout in LAYOUTS.items():
        learner, rows = Learner(laid_out(make_spec(folder), name, layout)), layout[-1]
        gradients = capture_gradients(learner)
        metrics = learner.update(share(make_batch(), rows, rank, world), OBJECTIVE)
        results[name] = {"metrics": metrics, "gradients": gradients, "weights": parameters(learner)}
    return results


def check_adam_step(got: dict[str, Tensor], want: dict[str, Any]) -> None:
    """New weights against those of a step with metrics, gradients and weights, taken by a learner of `make_spec`."""
    optim, (norm, count) = make_spec(Path()).optim, want["metrics"]["grad_norm"]
    assert optim is not None
    check_first_step(
        got, want["weights"], want["gradients"], adam=optim.adam, grad_norm=norm / count, max_norm=optim.max_norm
    )


def linear_attention(rank: int, world: int, folder: Path) -> dict[int, dict[str, Any]]:
    """Stage -> a step of a model with a layer that carries a state; on stage 3 with checkpointing."""
    results = {}
    for stage in (0, 3):
        spec = make_spec(folder, stage=stage, micro=2, model="qwen3_next")
        learner = Learner(replace(spec, model=ModelConfig(gradient_checkpointing_enable=stage == 3)))
        gradients = capture_gradients(learner)
        metrics = learner.update(share(make_batch(), [0, 1, 2, 3], rank, world), OBJECTIVE)
        results[stage] = {"metrics": metrics, "gradients": gradients, "weights": parameters(learner)}
    return results


WIDE = ("wide", "wide_untied")
"""Models whose output layer is larger than what ZeRO-3 keeps whole: 131,072 numbers."""


def wide(rank: int, world: int, folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Model -> stage -> log-probs (also of another distribution), a step, and how much of the layer lies here."""
    results: dict[str, dict[int, dict[str, Any]]] = {}
    batch = share(make_batch(), [0, 1, 2], rank, world)
    for model in WIDE:
        results[model] = {}
        for stage in (0, 3):
            spec = make_spec(folder, stage=stage, micro=2, model=model, temperature=0.7, suppressed_token_ids=(3, 4))
            spec = replace(spec, truncation=Truncation(top_p=0.8 if model == "wide_untied" else 1.0))
            learner = Learner(spec)
            layer = learner.module.model.get_output_embeddings()
            found: dict[str, Any] = {"local": [layer.weight.numel()]}
            found["logprobs"] = learner.score(batch).logprobs
            found["whole vocabulary"] = learner.score(batch, distribution=TokenDistribution()).logprobs
            found["local"].append(layer.weight.numel())
            found["gradients"] = capture_gradients(learner)
            found["metrics"] = [learner.update(batch, OBJECTIVE) for _ in range(3)]
            found["local"].append(layer.weight.numel())
            frozen = Learner(replace(spec, optim=None, role=Role.REFERENCE))
            found["frozen"] = frozen.score(batch).logprobs
            results[model][stage] = found
    return results


FIX = {"is_correction_enable": True, "is_correction_threshold": (0.7, 1.3)}
LOSSES: dict[str, PolicyObjective] = {
    "gspo, icepop": PolicyObjective(
        config=PolicyLossConfig(policy_loss_type="gspo", entropy_coef=0.02),
        correction=AdvantageConfig(is_correction_type="icepop", **FIX),
    ),
    "sequence mean, tis, dual clip": PolicyObjective(
        config=PolicyLossConfig(loss_agg_mode="seq-mean-token-mean", dual_clip=1.1),
        correction=AdvantageConfig(is_correction_type="tis", **FIX),
        kl_coef=0.2,
        kl_estimator="k2",
    ),
    "constant length, seq-mask-tis": PolicyObjective(
        config=PolicyLossConfig(loss_agg_mode="seq-mean-token-sum-norm", eps_clip_low_high=(0.1, 0.3)),
        correction=AdvantageConfig(is_correction_type="seq-mask-tis", **FIX),
        agg_constant=9.0,
    ),
} | {
    name: PolicyObjective(config=PolicyLossConfig(policy_loss_type=name), kl_coef=0.1, kl_estimator="k3")
    for name in POLICY_LOSSES
    if name not in ("ppo", "gspo")
}


def loss_batch() -> Batch:
    """`make_batch` with log-probs of a rollout engine that disagrees a little."""
    batch = make_batch()
    assert batch.old_logprobs is not None
    noise = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(9))
    return batch.with_(rollout_logprobs=(batch.old_logprobs + 0.3 * noise) * batch.action_mask)


def losses(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Other losses than `OBJECTIVE`, in uneven shares; and old log-probs left out against old log-probs scored."""
    results = {}
    batch = share(loss_batch(), [0, 1, 2, 3, 4], rank, world)
    for name, objective in LOSSES.items():
        learner = Learner(make_spec(folder, micro=2))
        gradients = capture_gradients(learner)
        results[name] = {"metrics": learner.update(batch, objective), "gradients": gradients}
    for name in ("long", "short"):
        learner = Learner(make_spec(folder, micro=3))
        gradients = capture_gradients(learner)
        old = learner.score(batch).logprobs if name == "long" else None
        metrics = learner.update(batch.with_(old_logprobs=old), replace(OBJECTIVE, detach_old=old is None))
        results[name] = {"metrics": metrics, "gradients": gradients}
    return results


def critic(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A critic from a plain language model: values, and one step of its loss."""
    results = {}
    for stage in (2, 3):
        learner = Learner(make_spec(folder, stage=stage, role=Role.CRITIC))
        gradients = capture_gradients(learner)
        batch = make_batch()
        values = learner.score(batch).values
        metrics = learner.update(share(batch, [0, 1, 2], rank, world), ValueObjective(value_clip=0.5))
        results[f"stage{stage}"] = {"values": values, "metrics": metrics, "gradients": gradients}
        learner.export_hf(str(folder / f"critic{world}-{stage}"))
    return results


def skipping(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Non-finite steps: skipped on all ranks, weights and schedule unmoved, an error after too many."""
    results = {}
    for stage, dtype in [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]:
        spec = make_spec(folder, stage=stage)
        ds = replace(spec.ds, param_dtype=dtype)
        learner = Learner(replace(spec, ds=ds, batch=replace(spec.batch, max_skipped_steps=2)))
        good = make_batch()
        assert good.advantages is not None
        bad_advantages = good.advantages.clone()
        bad_advantages[6, good.action_mask[6].nonzero()[0]] = float("inf")
        bad = good.with_(advantages=bad_advantages)
        before = parameters(learner)
        first = learner.update(share(bad, [0, 1, 2, 3], rank, world), OBJECTIVE)
        unmoved = parameters(learner)
        good_step = learner.update(share(good, [0, 1, 2, 3], rank, world), OBJECTIVE)
        moved = parameters(learner)
        message, asked = "", 0
        try:
            for _ in range(4):
                asked += 1
                learner.update(share(bad, [0, 1, 2, 3], rank, world), OBJECTIVE)
        except NonFiniteStepError as error:
            message = str(error)
        results[f"stage{stage}-{dtype}"] = {
            "first": first,
            "good": good_step,
            "unmoved": all(torch.equal(before[n], unmoved[n]) for n in before),
            "moved": any(not torch.equal(before[n], moved[n]) for n in before),
            "message": message,
            "asked": asked,
            "steps": learner.optimizer_steps,
        }
    return results


def nothing_to_train(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """No trainable token anywhere: no step, nothing moves, nothing hangs."""
    learner = Learner(make_spec(folder, stage=2))
    batch = make_batch()
    batch = batch.with_(action_mask=torch.zeros_like(batch.action_mask))
    before = parameters(learner)
    metrics = learner.update(share(batch, [0], rank, world), OBJECTIVE)
    after = parameters(learner)
    return {"metrics": metrics, "unmoved": all(torch.equal(before[n], after[n]) for n in before)}


def accumulation(rank: int, world: int, folder: Path) -> dict[str, list[float]]:
    """Four equal samples as 4×1, 2×2 and 1×4: the gradient norms, and how often ranks reduced something meanwhile."""
    found: dict[str, list[float]] = {"norms": [], "reductions": []}
    for micro in (4, 2, 1):
        learner = Learner(make_spec(folder, stage=2, micro=micro))
        batch = make_batch(4, seed=5)
        full = torch.ones_like(batch.attention_mask)
        actions = full.clone()
        actions[:, :3] = False
        batch = batch.with_(tokens=batch.tokens.clamp(min=3), attention_mask=full, action_mask=actions)
        batch = batch.with_(old_logprobs=torch.full(full.shape, -4.85) * actions)
        with patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as reduce:
            metrics = learner.update(share(batch, [0, 1], rank, world), OBJECTIVE)
        found["norms"].append(metrics["grad_norm"][0])
        found["reductions"].append(reduce.call_count)
    return found


CASES: dict[str, Case] = {
    "layouts": layouts,
    "losses": losses,
    "critic": critic,
    "skipping": skipping,
    "nothing_to_train": nothing_to_train,
    "accumulation": accumulation,
    "linear_attention": linear_attention,
    "wide": wide,
}
