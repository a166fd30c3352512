"""Tensor parallelism on real ranks: two hold one model in shards and do the same step as one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero.tensor_parallel import check_model, check_world, layer_specs
from support.learner_models import make_batch, plain_logprobs, tiny_config
from support.learner_ranks import RankResults, result
from support.learner_shard_cases import SHARD_LAYOUTS, check_step

RANK_CASES = {2: ["shard_layouts", "shard_exports", "shard_resume", "shard_mistakes"], 1: ["layouts"]}

on_ranks = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]


def with_ranks(test: Any) -> Any:
    for mark in on_ranks:
        test = mark(test)
    return test


@with_ranks
@pytest.mark.parametrize("layout", SHARD_LAYOUTS)
def test_the_step_is_that_of_one_rank(ranks: RankResults, layout: str) -> None:
    check_step(result(ranks, "shard_layouts", 2), result(ranks, "layouts", 1)[0]["stage0"], layout)


@with_ranks
def test_every_hidden_matrix_is_cut(ranks: RankResults) -> None:
    for of_rank in result(ranks, "shard_layouts", 2):
        cut = of_rank["stage2"]["cut"]
        assert len(cut) == 2 * 7
        assert all("_proj.weight" in name for name in cut)


@with_ranks
@pytest.mark.parametrize("model", ["qwen3", "untied"])
def test_stream_and_export_are_whole(ranks: RankResults, model: str) -> None:
    from transformers import AutoModelForCausalLM

    outcome = result(ranks, "shard_exports", 2)[0][model]
    tensors = load_file(f"{outcome['path']}/model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in outcome["stream"].items())
    assert [(n, s) for n, s, _ in outcome["metadata"]] == [(n, tuple(t.shape)) for n, t in outcome["stream"].items()]
    averages = load_file(f"{outcome['path']}/ema/model.safetensors")
    for name, before in outcome["before"].items():
        assert torch.allclose(averages[name], (before + outcome["stream"][name]) / 2, atol=1e-6), name
    hf, batch = (
        AutoModelForCausalLM.from_pretrained(outcome["path"], attn_implementation="eager"),
        make_batch(3, seed=9),
    )
    with torch.no_grad():
        logprobs, entropy = plain_logprobs(hf, batch)
    assert float((outcome["logprobs"].logprobs - logprobs).abs().max()) < 1e-5
    assert float((outcome["logprobs"].entropy - entropy).abs().max()) < 1e-5


@with_ranks
@pytest.mark.parametrize("offload", [False, True])
def test_frozen_model_is_cut_too(ranks: RankResults, rank_folder: Path, offload: bool) -> None:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(rank_folder / "qwen3", attn_implementation="eager")
    with torch.no_grad():
        want, _ = plain_logprobs(hf, make_batch())
    for outcome in result(ranks, "shard_exports", 2):
        assert float((outcome[f"reference-{offload}"] - want).abs().max()) < 1e-5


@with_ranks
@pytest.mark.parametrize("case", ["0-policy", "2-critic"])
def test_resumed_shards_equal_the_uninterrupted_ones(ranks: RankResults, case: str) -> None:
    for outcome in (of_rank[case] for of_rank in result(ranks, "shard_resume", 2)):
        assert outcome["metrics"]
        assert outcome["weights"]
        assert outcome["ema"]


@with_ranks
def test_different_samples_within_a_group_are_noticed(ranks: RankResults) -> None:
    for messages in result(ranks, "shard_mistakes", 2):
        assert "different samples" in messages["samples"]


def spec(size: int = 2, optim: OptimConfig | None = OptimConfig(), **ds: Any) -> LearnerSpec:  # noqa: B008 (frozen)
    ds = {"param_dtype": "fp32", "attn_implementation": "sdpa", "tensor_parallel_size": size} | ds
    return LearnerSpec(role=Role.POLICY, model_path="m", ds=DsConfig(**ds), optim=optim)


def test_zero_3_muon_and_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`ds\.tensor_parallel_size` 2 and `ds\.zero_stage` 3: ZeRO-3 cuts"):
        spec(zero_stage=3)
    with pytest.raises(ValueError, match=r"`optim\.optim` 'muon' and `ds\.tensor_parallel_size` 2: Muon needs whole"):
        spec(optim=OptimConfig(optim="muon"))
    with pytest.raises(ValueError, match=r"`ds\.lora\.rank` 4 and `ds\.tensor_parallel_size` 2: adapters are not cut"):
        spec(lora=LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("arch", "size", "message"),
    [
        ("gpt2", 2, "no tensor-parallel plan for 'gpt2'"),
        ("qwen3_moe", 2, "DeepSpeed cannot"),
        ("qwen3", 4, "does not divide the 2 num_attention_heads"),
    ],
)
def test_models_that_cannot_be_cut(arch: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"`ds\.tensor_parallel_size` {size}.*{message}"):
        check_model(spec(size), tiny_config(arch))


def test_ranks_that_are_no_whole_groups() -> None:
    check_world(2, 4)
    with pytest.raises(ValueError, match=r"`ds\.tensor_parallel_size` 2 does not divide the 3 ranks"):
        check_world(2, 3)


def test_layers_of_a_plan() -> None:
    plan = {
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.q_norm": "replicated_with_grad_allreduce",
        "e": "embedding_rowwise",
    }
    matrix = {"patterns": [r"(.*\.)?layers\.[0-9]+\.mlp\.up_proj\.weight$"], "partition_type": "column"}
    norm = {"patterns": [r"(.*\.)?layers\.[0-9]+\.q_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True}
    assert layer_specs(plan, trained=True) == [matrix, norm]
    assert layer_specs(plan, trained=False) == [matrix]
