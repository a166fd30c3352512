"""Adapters in the weight stream: merged as peft merges them, or apart with their scale; the model stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.learner.config import LoraConfig
from openrlhf.learner.heads import TokenDistribution, token_head
from openrlhf.learner.lora import add_adapters
from openrlhf.learner.lora_stream import base_weight, lora_layers, streamed
from openrlhf.learner.modules import LearnerModule
from support.learner_lora_cases import MODELS
from support.learner_models import make_batch, plain_logprobs, tiny_config
from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {2: ["lora_streams"]}
STAGES = [0, 2, 3]


def merged_by_peft(base: Path, adapter: str) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()  # type: ignore[operator]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
def test_the_merged_stream_is_the_model_that_peft_merges(
    ranks: RankResults, rank_folder: Path, model: str, stage: int
) -> None:
    # K01: alpha / r once, in the right place; a tied head comes once; a rank that only helps gets the same
    first, second = (outcome[f"{model}-{stage}"] for outcome in result(ranks, "lora_streams", 2))
    peft = merged_by_peft(rank_folder / model, first["path"])
    want = dict(peft.named_parameters())
    assert first["whole"].keys() == want.keys()
    assert first["metadata"] == [(name, tuple(p.shape), p.dtype) for name, p in want.items()]
    assert all(torch.allclose(first["whole"][n], want[n], rtol=0, atol=1e-7) for n in want), "another merge than peft's"
    assert all(torch.equal(first["whole"][n], second["whole"][n]) for n in want)
    with torch.no_grad():
        logprobs, _ = plain_logprobs(peft, make_batch(3, seed=9))
    assert float((first["logprobs"] - logprobs).abs().max()) < 1e-5
    assert first["unchanged"], "a push must not change the model"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
def test_later_pushes_hold_what_adapters_change_and_what_engines_fuse_it_with(
    ranks: RankResults, model: str, stage: int
) -> None:
    # K02: with adapters on q and v alone an engine still needs k, or its fused layer is half old
    outcome = result(ranks, "lora_streams", 2)[0][f"{model}-{stage}"]
    whole, moving = outcome["whole"], outcome["moving"]
    assert all(torch.equal(moving[name], whole[name]) for name in moving)
    modules = {name.rpartition(".")[0].rpartition(".")[0] for name in moving}
    blocks = ("transformer.h", "attn mlp") if model == "gpt2" else ("model.layers", "self_attn mlp")
    assert modules == {f"{blocks[0]}.{layer}.{block}" for layer in (0, 1) for block in blocks[1].split()}
    inside = {name for name in whole if any(name.startswith(module + ".") for module in modules)}
    assert moving.keys() == inside
    assert not any("embed" in name or "wte" in name or "lm_head" in name for name in moving)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
def test_apart_the_second_factor_carries_the_scale(ranks: RankResults, model: str, stage: int) -> None:
    # K03: the engine is told a scale of 1, so that it can neither forget alpha / r nor apply it twice
    outcome = result(ranks, "lora_streams", 2)[0][f"{model}-{stage}"]
    files = load_file(f"{outcome['path']}/adapter_model.safetensors")
    assert outcome["apart"].keys() == files.keys()
    assert outcome["apart_metadata"] == [(name, tuple(t.shape)) for name, t in outcome["apart"].items()]
    for name, tensor in outcome["apart"].items():
        scale = 12 / 4 if ".lora_B." in name else 1.0
        assert torch.equal(tensor, files[name] * scale), name
    assert any(bool(tensor.any()) for name, tensor in outcome["apart"].items() if ".lora_B." in name)
    base = {name for name, _, _ in outcome["metadata"]}
    assert set(outcome["apart_whole"]) == base | files.keys()


def module_with(arch: str, *targets: str, **sizes: Any) -> LearnerModule:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(arch, **sizes))
    add_adapters(model, LoraConfig(rank=2, alpha=4, target_modules=targets))
    return LearnerModule(model, token_head(model), head_name="", distribution=TokenDistribution(), aux_loss=False)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_a_tied_matrix_is_refused(target: str) -> None:
    # K04: the trainer adds it to one of two users of the matrix, an engine that holds it merged to both
    with pytest.raises(ValueError, match=f"an adapter on '(model.)?{target}', whose matrix other modules use too"):
        streamed(module_with("qwen3", "q_proj", target), skip_frozen=False)
    names = [item.name for item in streamed(module_with("qwen3", "q_proj", target, tie=False), skip_frozen=False)]
    assert sum(target in name for name in names) == 1


@pytest.mark.parametrize("kind", [{"use_rslora": True}, {"use_dora": True}], ids=str)
def test_other_kinds_of_adapters_are_merged_as_peft_merges_them(kind: dict[str, bool]) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config())
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], **kind)  # type: ignore[arg-type]
    wrapped = peft.get_peft_model(model, settings)
    module = LearnerModule(model, token_head(model), head_name="", distribution=TokenDistribution(), aux_loss=False)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    items = streamed(module, skip_frozen=False)
    before = {name: p.clone() for name, p in module.named_parameters()}
    got = {item.name: item.make([p.detach() for p in item.parameters]).clone() for item in items}
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    want = dict(wrapped.merge_and_unload().named_parameters())  # type: ignore[operator]
    assert got.keys() == want.keys()
    assert all(torch.allclose(got[name], want[name], rtol=0, atol=1e-6) for name in want)


def test_half_precision_is_rounded_once() -> None:
    module = module_with("qwen3", "q_proj").to(torch.bfloat16)
    ((path, layer), *_) = lora_layers(module)
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(std=0.1)
    item = next(i for i in streamed(module, skip_frozen=False) if path.removeprefix("model.") in i.name)
    got = item.make([p.detach() for p in item.parameters])
    weight, a, b = (p.detach().double() for p in item.parameters)
    assert base_weight(layer) is item.parameters[0]
    assert got.dtype == torch.bfloat16
    exact = weight + 2.0 * b @ a
    nearest = exact.to(torch.bfloat16)
    assert float((got == nearest).double().mean()) > 0.999, "float32 may round another way at a tie, nowhere else"
    assert float((weight.to(torch.bfloat16) + (2.0 * b @ a).to(torch.bfloat16) == nearest).double().mean()) < 0.99


def test_experts_that_have_no_adapter_stay_and_come_in_the_form_of_files() -> None:
    module = module_with("qwen3_moe", "q_proj")
    moving = [item.name for item in streamed(module, skip_frozen=True)]
    assert moving
    assert not any("experts" in name for name in moving)
