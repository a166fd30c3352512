"""Adapters: where they are put, what is trained, and what the model computes with them and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig
from openrlhf.learner.lora import check_targets, export_adapters, merge
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.setup import training_device
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import save_tiny_model, tiny_config
from support.learner_vision_cases import FAMILIES
from support.plain_backend import PlainEngine
from support.tiny_models import byte_tokenizer
from support.vision_models import vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("lora") / "qwen3")


def load(path: Path, lora: LoraConfig, *, role: Role = Role.POLICY, trained: bool = True) -> LearnerModule:
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", lora=lora)
    spec = LearnerSpec(role=role, model_path=str(path), ds=ds, optim=OptimConfig() if trained else None)
    return load_module(spec, training_device())


def trained_names(module: LearnerModule) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def test_adapters_take_their_options(model: Path) -> None:
    """rank, alpha, dropout, target_modules."""
    lora = LoraConfig(rank=4, alpha=6, dropout=0.25, target_modules=("q_proj", "up_proj"))
    module = load(model, lora)
    layer = module.model.model.layers[0]
    assert {name.split(".")[-4] for name in trained_names(module)} == {"q_proj", "up_proj"}
    assert layer.self_attn.q_proj.lora_A["default"].weight.shape == (4, 64)
    assert layer.mlp.up_proj.lora_B["default"].weight.shape == (192, 4)
    assert layer.mlp.up_proj.scaling == {"default": 6 / 4}
    assert layer.mlp.up_proj.lora_dropout["default"].p == 0.25


def test_a_frozen_role_has_no_adapters(model: Path) -> None:
    module = load(model, LoraConfig(rank=4), role=Role.REFERENCE, trained=False)
    assert not [name for name, _ in module.named_parameters() if "lora" in name]


def test_all_linear_spares_embedding_and_head(model: Path) -> None:
    names = trained_names(load(model, LoraConfig(rank=2)))
    places = {name.split(".")[-4] for name in names}
    assert places == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(names) == 2 * 7 * 2


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("q_proj", "up_porj"), "up_porj: the model has no such module. Linear modules are q_proj, k_proj, v_proj, "),
        (("all-linear", "q_proj"), "all-linear: stands alone"),
        (("input_layernorm",), "is not supported"),
    ],
)
def test_a_module_that_is_not_there_is_named_with_those_that_are(
    model: Path, targets: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=r"`ds\.lora\.target_modules`") as caught:
        load(model, LoraConfig(rank=2, target_modules=targets))
    assert words in str(caught.value)
    assert "gate_proj, up_proj, down_proj, lm_head" in str(caught.value)


def test_a_critic_leaves_out_the_policys_head(model: Path) -> None:
    lora = LoraConfig(rank=2, target_modules=("q_proj", "lm_head"))
    names = trained_names(load(model, lora, role=Role.CRITIC))
    assert {name.split(".")[-4] for name in names if "lora" in name} == {"q_proj"}
    assert [name for name in names if "lora" not in name] == ["head.weight"]


def test_names_of_modules_are_checked_without_weights(tmp_path: Path) -> None:
    tiny_config("gpt2").save_pretrained(tmp_path)
    check_targets(str(tmp_path), LoraConfig(rank=2, target_modules=("c_attn", "mlp.c_proj")))
    with pytest.raises(ValueError, match=r"no such module\. Linear modules are c_attn, c_proj, c_fc"):
        check_targets(str(tmp_path), LoraConfig(rank=2, target_modules=("c_attn", "q_proj")))


def test_a_frozen_visual_encoder_gets_no_adapter(tmp_path: Path) -> None:
    vision_model(FAMILIES[0]).save_pretrained(tmp_path)
    places = {}
    for frozen in (False, True):
        ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", lora=LoraConfig(rank=2))
        spec = LearnerSpec(role=Role.POLICY, model_path=str(tmp_path), ds=ds, optim=OptimConfig())
        module = load_module(replace(spec, freeze_visual_encoder=frozen), training_device())
        places[frozen] = {"visual" in name or "vision" in name for name in trained_names(module)}
    assert places == {False: {False, True}, True: {False}}


def test_the_adapter_of_a_vision_model_is_loaded_and_merged(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    base, exported, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    vision_model(FAMILIES[0]).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    module = load(base, LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.5)
    tokens = {"input_ids": torch.arange(3, 11)[None]}
    with torch.no_grad():
        want = module.eval().model(**tokens).logits
    export_adapters(PlainEngine(module), str(exported), None, source=str(base))
    plain: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    merge(str(base), str(exported), str(merged), reward_model=False, dtype=torch.float32)
    found = [
        PeftModel.from_pretrained(plain, exported).eval(),
        AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval(),
    ]
    with torch.no_grad():
        apart = [float((model(**tokens).logits - want).abs().max()) for model in found]
    assert max(apart) < 1e-4 * float(want.abs().max())
