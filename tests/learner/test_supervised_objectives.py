"""Supervised and preference losses on real ranks: closed forms, and the same numbers however the rows are laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.learner_models import plain_logprobs
from support.learner_ranks import RankResults, result
from support.learner_supervised_cases import LAYOUTS, OBJECTIVES, pair_batch
from support.tiny_models import byte_tokenizer

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {1: ["supervised_layouts", "adapters"], 2: ["supervised_layouts", "idle_rank", "adapters"]}


def log_sigmoid(x: Tensor) -> Tensor:
    return -(1 + (-x).exp()).log()


@pytest.fixture(scope="module")
def closed(rank_folder: Path) -> dict[str, Any]:
    """Losses and gradients in plain PyTorch, one sample at a time, by their formulas."""
    from transformers import AutoModelForCausalLM

    batch = pair_batch()
    assert batch.ref_logprobs is not None
    found = {}
    for name in ("sft", "dpo", "ipo"):
        model = AutoModelForCausalLM.from_pretrained(rank_folder / "qwen3", dtype=torch.float32)
        logprobs, _ = plain_logprobs(model, batch)
        tokens = batch.action_mask.sum(-1)
        policy, reference = (logprobs * batch.action_mask).sum(-1), batch.ref_logprobs.sum(-1)
        z = (policy - reference)[0::2] - (policy - reference)[1::2]
        nll = -(policy / tokens)[0::2].mean()
        loss = {
            "sft": -policy.sum() / tokens.sum(),
            "dpo": (-0.9 * log_sigmoid(0.2 * z) - 0.1 * log_sigmoid(-0.2 * z)).mean() + 0.3 * nll,
            "ipo": (z - 1 / 0.4).square().mean(),
        }[name]
        loss.backward()
        found[name] = {
            "loss": (loss - 0.3 * nll if name == "dpo" else loss).item(),
            "nll": nll.item(),
            "acc": (z > 0).float().mean().item(),
            "gradients": {n: p.grad for n, p in model.named_parameters()},
        }
    return found


def mean(metrics: dict[str, tuple[float, float]], name: str) -> float:
    return metrics[name][0] / metrics[name][1]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["sft", "dpo", "ipo"])
def test_losses_and_gradients_are_the_closed_forms(
    ranks: RankResults, closed: dict[str, Any], name: str, world: int
) -> None:
    got, want = result(ranks, "supervised_layouts", world)[0][f"{name}-whole"], closed[name]
    term = "gpt_loss" if name == "sft" else "loss"
    for metrics in (got["metrics"], got["evaluation"]):
        assert mean(metrics, term) == pytest.approx(want["loss"], abs=1e-5)
        if name != "sft":
            assert mean(metrics, "acc") == want["acc"]
        if name == "dpo":
            assert mean(metrics, "nll_loss") == pytest.approx(want["nll"], abs=1e-5)
    assert max(float((got["gradients"][n] - g).abs().max()) for n, g in want["gradients"].items()) < 2e-5


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "whole"])
@pytest.mark.parametrize("name", ["sft", "rm", "dpo"])
def test_the_loss_does_not_depend_on_micro_batches_packing_or_ranks(
    ranks: RankResults, name: str, layout: str, world: int
) -> None:
    want = result(ranks, "supervised_layouts", 1)[0][f"{name}-whole"]
    got = result(ranks, "supervised_layouts", world)[0][f"{name}-{layout}"]
    for key in ("metrics", "evaluation"):
        assert got[key].keys() == want[key].keys()
        for metric in want[key]:
            assert mean(got[key], metric) == pytest.approx(mean(want[key], metric), abs=1e-6, rel=1e-5)
    difference = max(float((got["gradients"][n] - g).abs().max()) for n, g in want["gradients"].items())
    assert difference < 5e-6


def test_the_reward_loss_reads_the_last_token_and_the_margins(ranks: RankResults) -> None:
    got = result(ranks, "supervised_layouts", 1)[0]["rm-whole"]["evaluation"]
    margins = pair_batch().margins
    assert margins is not None
    assert mean(got, "chosen_reward") + mean(got, "reject_reward") == pytest.approx(2 * mean(got, "reward"))
    assert got["reward"][1] == 8
    assert mean(got, "loss") > 0


def test_a_rank_without_pairs_takes_part(ranks: RankResults) -> None:
    first, second = result(ranks, "idle_rank", 2)
    whole = result(ranks, "supervised_layouts", 1)[0]
    for name in OBJECTIVES:
        assert first[name] == second[name]
        assert first[name][1][0] == pytest.approx(whole[f"{name}-whole"]["metrics"]["grad_norm"][0], rel=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_train_alone_and_merge_into_the_same_model(
    ranks: RankResults, rank_folder: Path, tmp_path: Path, world: int
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from openrlhf.learner.lora import merge

    got = result(ranks, "adapters", world)[0]["sft"]
    assert got["moved"]
    assert all(".lora_A." in name or ".lora_B." in name for name in got["moved"])
    adapter = rank_folder / f"adapter-sft-{world}"
    low = load_file(adapter / "adapter_model.safetensors")
    byte_tokenizer().save_pretrained(adapter)
    merge(str(rank_folder / "qwen3"), str(adapter), str(tmp_path / "m"), reward_model=False, dtype=torch.float32)
    base = load_file(rank_folder / "qwen3" / "model.safetensors")
    merged = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    change = low[f"base_model.model.{name}.lora_B.weight"] @ low[f"base_model.model.{name}.lora_A.weight"] * (8 / 4)
    assert change.abs().max() > 0
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + change)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        logprobs, _ = plain_logprobs(model, pair_batch())
    torch.testing.assert_close(got["scores"].logprobs, logprobs, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="holds no scalar head: leave --is_rm out"):
        merge(str(rank_folder / "qwen3"), str(adapter), str(tmp_path / "x"), reward_model=True, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"is no adapter: it has no adapter_config\.json"):
        merge(str(rank_folder / "qwen3"), str(tmp_path), str(tmp_path / "x"), reward_model=False, dtype=torch.float32)


def test_a_reward_models_adapter_brings_its_head_and_statistics(
    ranks: RankResults, rank_folder: Path, tmp_path: Path
) -> None:
    from openrlhf.learner.config import DsConfig
    from openrlhf.learner.learner import Learner
    from openrlhf.learner.lora import merge
    from openrlhf.learner.spec import LearnerSpec, Role

    got = result(ranks, "adapters", 1)[0]["rm"]
    assert "score.weight" in got["moved"]
    adapter = rank_folder / "adapter-rm-1"
    byte_tokenizer().save_pretrained(adapter)
    merge(str(rank_folder / "qwen3"), str(adapter), str(tmp_path / "m"), reward_model=True, dtype=torch.float32)
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa")
    served = Learner(LearnerSpec(role=Role.REWARD, model_path=str(tmp_path / "m"), ds=ds))
    assert served.reward_mean_std == (0.5, 2.0)
    torch.testing.assert_close(served.score(pair_batch()).rewards, got["scores"].rewards, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="is one of a reward model: add --is_rm"):
        merge(str(rank_folder / "qwen3"), str(adapter), str(tmp_path / "x"), reward_model=False, dtype=torch.float32)
