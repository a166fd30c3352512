"""One optimiser step on real ranks: the same loss, gradients and weights however the samples are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.core.kl import kl_estimate
from support.learner_models import make_batch, plain_logprobs, save_tiny_model
from support.learner_ranks import join_ranks, start_ranks
from support.learner_step_cases import LAYOUTS, OBJECTIVE

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks")]

MODULE = "support.learner_step_cases"
NAMES = ["layouts", "critic", "skipping", "nothing_to_train", "accumulation"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learner")
    save_tiny_model(path / "qwen3")
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, dict[str, list[Any]]]:
    """{world size: {case: results per rank}}."""
    alone = start_ranks(MODULE, ["layouts", "accumulation"], folder, 1)
    two = join_ranks(start_ranks(MODULE, NAMES, folder, 2), NAMES, folder, 2)
    return {1: join_ranks(alone, ["layouts", "accumulation"], folder, 1), 2: two}


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    """The step's loss terms and gradients from plain PyTorch, in one piece, without any of our code but the batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
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
    results: dict[int, dict[str, list[Any]]], reference: dict[str, Any], layout: str, world: int
) -> None:
    # B001, B002, B005, B010, B123: micro-batches, ranks, packing and stages are one exact mean; an idle rank takes part
    for result in (rank_result[layout] for rank_result in results[world]["layouts"]):
        metrics = {name: total / count for name, (total, count) in result["metrics"].items()}
        for name in ("policy_loss", "kl", "entropy_loss", "grad_norm"):
            assert metrics[name] == pytest.approx(reference[name], abs=1e-6), name
        assert metrics["skipped_steps"] == 0
        assert _largest_difference(result["gradients"], reference["gradients"]) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_weights_do_not_depend_on_stage_or_world_size(
    results: dict[int, dict[str, list[Any]]], layout: str
) -> None:
    want = results[1]["layouts"][0]["stage0"]["weights"]
    for world in (1, 2):
        got = results[world]["layouts"][0][layout]["weights"]
        assert _largest_difference(got, want) < 2e-5  # AdamW divides tiny gradients by their own size


def test_only_rank_0_gets_the_stream(results: dict[int, dict[str, list[Any]]]) -> None:
    for layout in ("stage2", "stage3"):
        assert results[2]["layouts"][1][layout]["weights"] == {}


def test_objective_is_what_the_reference_assumes() -> None:
    assert OBJECTIVE.coefficients == {"policy_loss": 1.0, "kl_loss": 0.1, "entropy_loss": -0.01, "aux_loss": 0.0}


def test_micro_batch_splits_give_one_gradient_norm(results: dict[int, dict[str, list[Any]]]) -> None:
    # B123
    norms = [norm for world in (1, 2) for norm in results[world]["accumulation"][0].values()]
    assert norms == pytest.approx([norms[0]] * 6, abs=1e-6)


def test_critic_values_and_loss_are_the_same_partitioned_or_not(results: dict[int, dict[str, list[Any]]]) -> None:
    ours, partitioned = results[2]["critic"][0]["stage2"], results[2]["critic"][1]["stage3"]
    assert torch.allclose(ours["values"], partitioned["values"], atol=1e-6)
    assert torch.equal(ours["values"][~make_batch().action_mask], torch.zeros(int((~make_batch().action_mask).sum())))
    assert ours["metrics"]["critic_loss"] == pytest.approx(partitioned["metrics"]["critic_loss"], abs=1e-5)
    assert _largest_difference(ours["gradients"], partitioned["gradients"]) < 1e-6
    assert "score.weight" in ours["gradients"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_non_finite_step_is_skipped_on_all_ranks(results: dict[int, dict[str, list[Any]]], stage: int) -> None:
    for result in (r[f"stage{stage}"] for r in results[2]["skipping"]):
        assert result["first"]["skipped_steps"] == (1.0, 1.0)
        assert result["unmoved"]
        assert result["moved"] or not result["good"]["skipped_steps"][0]
        assert result["good"]["skipped_steps"] == (0.0, 1.0)
        assert result["steps"] == 1
        assert "--train.max_skipped_steps 1" in result["message"]
        assert "number 6" in result["message"]


def test_batch_without_trainable_tokens_takes_no_step(results: dict[int, dict[str, list[Any]]]) -> None:
    # B005
    for result in results[2]["nothing_to_train"]:
        assert result == {"metrics": {}, "unmoved": True}
