"""One optimiser step on real ranks: the same loss, gradients and weights however the samples are laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.kl import kl_estimate
from openrlhf.learner.config import DsConfig, TrainBatchConfig
from openrlhf.learner.micro_batches import score_plan, update_plan
from openrlhf.learner.objective import ModelOutputs, sum_terms
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch, plain_logprobs
from support.learner_ranks import RankResults, result
from support.learner_step_cases import LAYOUTS, LOSSES, OBJECTIVE, WIDE, check_adam_step, loss_batch

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {
    2: ["layouts", "losses", "critic", "skipping", "nothing_to_train", "accumulation", "linear_attention", "wide"],
    1: ["layouts", "losses", "accumulation"],
}


@pytest.fixture(scope="module")
def reference(rank_folder: Path) -> dict[str, Any]:
    """The step's loss terms and gradients from plain PyTorch, in one piece, without any of our code but the batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(rank_folder / "qwen3", dtype=torch.float32)
    batch = make_batch()
    assert batch.advantages is not None
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    logprobs, entropy = plain_logprobs(model, batch)
    mask = batch.action_mask
    tokens = float(mask.sum())
    ratio = (logprobs - batch.old_logprobs).exp()
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    policy = -(surrogate * mask).sum() / tokens
    kl = (kl_estimate(logprobs, batch.ref_logprobs, "k3") * mask).sum() / tokens
    mean_entropy = (entropy * mask).sum() / tokens
    (policy + 0.1 * kl - 0.01 * mean_entropy).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm([g for g in gradients.values() if g is not None])
    return {
        "policy_loss": policy.item(),
        "kl": kl.item(),
        "entropy_loss": mean_entropy.item(),
        "grad_norm": norm.item(),
        "gradients": gradients,
    }


def _largest_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).abs().max()) for n in want)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_do_not_depend_on_the_layout(
    ranks: RankResults, reference: dict[str, Any], layout: str, world: int
) -> None:
    # B001, B002, B005, B010, B123: micro-batches, ranks, packing and stages are one exact mean; an idle rank takes part
    for outcome in (of_rank[layout] for of_rank in result(ranks, "layouts", world)):
        metrics = {name: total / count for name, (total, count) in outcome["metrics"].items()}
        for name in ("policy_loss", "kl", "entropy_loss", "grad_norm"):
            assert metrics[name] == pytest.approx(reference[name], rel=1e-6, abs=1e-6), name
        assert metrics["skipped_steps"] == 0
        assert _largest_difference(outcome["gradients"], reference["gradients"]) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_weights_do_not_depend_on_stage_or_world_size(ranks: RankResults, layout: str) -> None:
    want = result(ranks, "layouts", 1)[0]["stage0"]
    for world in (1, 2):
        for outcome in result(ranks, "layouts", world):
            check_adam_step(outcome[layout]["weights"], want)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_one_gradient_on_one_and_two_ranks(ranks: RankResults, rank_folder: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(rank_folder / "qwen3", dtype=torch.float32)
    batch, objective = loss_batch(), LOSSES[name]
    logprobs, entropy = plain_logprobs(model, batch)
    terms = objective(ModelOutputs(logprobs=logprobs, entropy=entropy if objective.with_entropy else None), batch)
    loss = sum_terms(terms, objective.coefficients, objective.counts(batch), world_size=1)
    assert loss is not None
    loss.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for outcome in (of_rank[name] for world in (1, 2) for of_rank in result(ranks, "losses", world)):
        assert _largest_difference(outcome["gradients"], want) < 1e-6
        total, count = outcome["metrics"]["policy_loss"]
        assert total / count == pytest.approx(float(terms["policy_loss"].total.detach()) / count, abs=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_leaving_out_the_old_logprobs_equals_scoring_them(ranks: RankResults, world: int) -> None:
    for outcome in result(ranks, "losses", world):
        short, long = outcome["short"], outcome["long"]
        assert _largest_difference(short["gradients"], long["gradients"]) < 1e-6
        for name, (total, count) in long["metrics"].items():
            assert short["metrics"][name][0] / count == pytest.approx(total / count, abs=1e-6), name
        assert short["metrics"]["ppo_clip_ratio"][0] == 0


def test_layers_with_a_state_train_alike_when_they_are_partitioned(ranks: RankResults) -> None:
    whole, partitioned = result(ranks, "linear_attention", 2)[0].values()
    assert any("conv1d" in name for name in whole["weights"])
    assert _largest_difference(partitioned["gradients"], whole["gradients"]) < 1e-6
    check_adam_step(partitioned["weights"], whole)


@pytest.mark.parametrize("model", WIDE)
def test_the_output_layer_is_gathered_for_its_head_alone(ranks: RankResults, model: str) -> None:
    for rank in (0, 1):
        whole, partitioned = result(ranks, "wide", 2)[rank][model].values()
        assert whole["local"] == [131_072] * 3
        assert partitioned["local"] == [0] * 3
        for name in ("logprobs", "whole vocabulary", "frozen"):
            assert float((partitioned[name] - whole[name]).abs().max()) < 1e-6
        assert float((whole["logprobs"] - whole["whole vocabulary"]).abs().max()) > 1e-2
        assert torch.equal(whole["logprobs"], whole["frozen"])
    assert _largest_difference(partitioned["gradients"], whole["gradients"]) < 1e-6
    for got, want in zip(partitioned["metrics"], whole["metrics"], strict=True):
        assert got["policy_loss"][0] == pytest.approx(want["policy_loss"][0], abs=1e-4)


@pytest.mark.parametrize("layout", ["stage2", "stage3"])
def test_every_rank_gets_the_same_stream(ranks: RankResults, layout: str) -> None:
    first, second = (of_rank[layout]["weights"] for of_rank in result(ranks, "layouts", 2))
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_objective_is_what_the_reference_assumes() -> None:
    trained = {name: weight for name, weight in OBJECTIVE.coefficients.items() if weight}
    assert trained == {"policy_loss": 1.0, "kl_loss": 0.1, "entropy_loss": -0.01}


def test_micro_batch_splits_give_one_gradient_norm(ranks: RankResults) -> None:
    # B123
    norms = [norm for world in (1, 2) for norm in result(ranks, "accumulation", world)[0]["norms"]]
    assert norms == pytest.approx([norms[0]] * 6, abs=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_on_a_cpu_stage_2_reduces_gradients_once_a_step(ranks: RankResults, world: int) -> None:
    one, two, four = result(ranks, "accumulation", world)[0]["reductions"]
    assert one == two == four > 0


def test_critic_values_and_loss_are_the_same_partitioned_or_not(ranks: RankResults) -> None:
    ours, partitioned = result(ranks, "critic", 2)[0]["stage2"], result(ranks, "critic", 2)[1]["stage3"]
    assert torch.allclose(ours["values"], partitioned["values"], atol=1e-6)
    assert torch.equal(ours["values"][~make_batch().action_mask], torch.zeros(int((~make_batch().action_mask).sum())))
    assert ours["metrics"]["critic_loss"] == pytest.approx(partitioned["metrics"]["critic_loss"], abs=1e-5)
    assert _largest_difference(ours["gradients"], partitioned["gradients"]) < 1e-6
    assert "score.weight" in ours["gradients"]


@pytest.mark.parametrize("case", [*(f"stage{n}-fp32" for n in range(4)), *(f"stage{n}-bf16" for n in (1, 2, 3))])
def test_non_finite_step_is_skipped_on_all_ranks(ranks: RankResults, case: str) -> None:
    for outcome in (r[case] for r in result(ranks, "skipping", 2)):
        assert outcome["first"]["skipped_steps"] == (1.0, 1.0)
        assert outcome["unmoved"]
        assert outcome["moved"]
        assert outcome["good"]["skipped_steps"] == (0.0, 1.0)
        assert outcome["steps"] == 1
        assert outcome["asked"] == 2  # N06: the run ends with the last step allowed, not one later
        assert outcome["message"].startswith("2 optimiser steps in a row")
        assert "`batch.max_skipped_steps` 2" in outcome["message"]
        assert "number 6" in outcome["message"]


def test_batch_without_trainable_tokens_takes_no_step(ranks: RankResults) -> None:
    # B005
    for outcome in result(ranks, "nothing_to_train", 2):
        assert outcome == {"metrics": {}, "unmoved": True}


@pytest.mark.parametrize("group", ["tensor_parallel_size", "ring_attn_size"])
@pytest.mark.parametrize(("size", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_n05_the_token_budget_is_that_of_every_device_of_a_group(group: str, size: int, micro_batches: int) -> None:
    sizes: dict[str, Any] = {group: size}
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", packing_samples=True, **sizes)
    batch = TrainBatchConfig(dynamic_batch_enable=True, max_tokens_per_gpu=200)
    spec = LearnerSpec(role=Role.POLICY, model_path="m", ds=ds, batch=batch)
    rows = Batch(
        tokens=torch.zeros(8, 100, dtype=torch.long),
        attention_mask=torch.ones(8, 100, dtype=torch.bool),
        action_mask=torch.zeros(8, 100, dtype=torch.bool),
        index=torch.arange(8),
    )
    assert len(update_plan(spec, rows, 1, shared=False, hidden_size=64)) == micro_batches
    assert len(score_plan(spec, rows, shared=False, hidden_size=64)) == micro_batches
    wider = replace(spec, score_max_tokens=400)
    assert len(score_plan(wider, rows, shared=False, hidden_size=64)) == -(-micro_batches // 2)
