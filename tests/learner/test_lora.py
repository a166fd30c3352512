"""Adapters: where they are put, what is trained, and what the model computes with them and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.setup import training_device
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import save_tiny_model
from support.learner_vision_cases import FAMILIES
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


def test_a_frozen_visual_encoder_gets_no_adapter(tmp_path: Path) -> None:
    vision_model(FAMILIES[0]).save_pretrained(tmp_path)
    places = {}
    for frozen in (False, True):
        ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", lora=LoraConfig(rank=2))
        spec = LearnerSpec(role=Role.POLICY, model_path=str(tmp_path), ds=ds, optim=OptimConfig())
        module = load_module(replace(spec, freeze_visual_encoder=frozen), training_device())
        places[frozen] = {"visual" in name or "vision" in name for name in trained_names(module)}
    assert places == {False: {False, True}, True: {False}}
