"""Whether vLLM can serve an adapter: what is read of it and of the model, without importing either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.vllm.adapters import no_room_for_adapter, serves_adapters
from openrlhf.rollout.vllm.arguments import vllm_args

LINEAR = ("q_proj", "v_proj")


def model(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]} | config))
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "serves"),
    [
        ("Qwen3ForCausalLM", True),
        ("LlamaForCausalLM", True),
        ("MistralForCausalLM", True),  # through its base class, in another file
        ("GPT2LMHeadModel", False),
        ("SomethingElse", False),
    ],
)
def test_vllms_own_source_says_which_models_take_adapters(architecture: str, serves: bool) -> None:
    assert serves_adapters(architecture) is serves


@pytest.mark.parametrize(
    ("config", "targets", "rank", "words"),
    [
        ({}, LINEAR, 8, ""),
        ({}, (), 512, ""),
        ({}, LINEAR, 513, "up to rank 512"),
        ({}, ("q_proj", "model.lm_head"), 8, "an adapter on model.lm_head"),
        ({"architectures": ["GPT2LMHeadModel"]}, LINEAR, 8, "vLLM has no adapters for GPT2LMHeadModel"),
        ({"architectures": None}, LINEAR, 8, "a model that names no class"),
        ({"vision_config": {}}, LINEAR, 8, "vision encoder"),
        ({"num_experts": 4}, LINEAR, 8, "mixture of experts"),
    ],
)
def test_why_not(tmp_path: Path, config: dict[str, Any], targets: tuple[str, ...], rank: int, words: str) -> None:
    said = no_room_for_adapter(model(tmp_path, **config), targets, rank)
    assert words in said
    assert bool(said) == bool(words)


def test_of_a_model_elsewhere_nothing_is_known() -> None:
    assert "is no folder" in no_room_for_adapter("some/model", LINEAR, 8)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (3, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_an_engine_gets_room_for_one_adapter(rank: int, room: int) -> None:
    args = vllm_args(EngineSpec(model="m", lora_rank=rank, lora_targets=("self_attn.q_proj", "v_proj", "q_proj")))
    assert args["enable_lora"] is True
    assert (args["max_loras"], args["max_lora_rank"]) == (1, room)
    assert args["lora_target_modules"] == ["q_proj", "v_proj"]
    assert args["worker_extension_cls"] == "openrlhf.rollout.weights.adapter.AdapterWorker"
    assert "lora_target_modules" not in vllm_args(EngineSpec(model="m", lora_rank=rank))
    assert "enable_lora" not in vllm_args(EngineSpec(model="m"))


def test_more_room_than_vllm_has_is_refused_and_so_are_the_users_own_arguments() -> None:
    with pytest.raises(ValueError, match="up to rank 512, got 513"):
        vllm_args(EngineSpec(model="m", lora_rank=513))
    with pytest.raises(ValueError, match="must not set 'worker_extension_cls'"):
        vllm_args(EngineSpec(model="m", lora_rank=8, engine_args={"worker_extension_cls": "a.B"}))
    with pytest.raises(ValueError, match="must not set 'enable_lora'; use `lora_push`"):
        vllm_args(EngineSpec(model="m", engine_args={"enable_lora": True}))
