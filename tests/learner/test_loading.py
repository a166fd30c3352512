"""What transformers reports about loaded weights is judged: silence when right, an error that names them when wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.learner.loading import load_pretrained
from support.launcher_reward_model import tiny_reward_model
from support.tiny_models import tiny_qwen3

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "untied"
    tiny_qwen3(folder, tied=False)
    return folder


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_reward_model(tmp_path_factory.mktemp("models") / "reward"))


def changed(model: Path, folder: Path, change: Callable[[Weights], Weights]) -> str:
    """A copy of the model with other weights in its file."""
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(change(load_file(model / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_l10_a_backbone_without_its_head_is_loaded_silently(
    reward_model: Path, model: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        load_pretrained(AutoModel, str(reward_model))  # the score is unexpected, and read by us
        load_pretrained(AutoModel, str(model))  # so is the language model's head
        load_pretrained(AutoModelForCausalLM, str(model))
    printed = capfd.readouterr()
    assert "REPORT" not in printed.out + printed.err + caplog.text
    assert "UNEXPECTED" not in printed.out + printed.err + caplog.text


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


def added(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: torch.zeros(3)}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("layers.1.self_attn.q_proj"), "layers.1.self_attn.q_proj.weight"),
        (without("lm_head"), "lm_head.weight"),
        (added("model.layers.0.self_attn.q_proj.bias"), "model.layers.0.self_attn.q_proj.bias"),
        (added("model.layers.0.mlp.up_proj.lora_A.weight"), "mlp.up_proj.lora_A.weight"),
        (added("model.layers.0.mlp.up_proj.weight_scale"), "mlp.up_proj.weight_scale"),
        (added("model.layers.0.self_attn.sinks"), "self_attn.sinks"),
    ],
)
def test_l10_weights_that_do_not_fit_are_named(
    change: Callable[[Weights], Weights], named: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="weights") as caught:
        load_pretrained(AutoModelForCausalLM, changed(model, tmp_path, change))
    assert named in str(caught.value)
    assert repr(str(tmp_path)) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["score.weight", "mtp.layers.0.up_proj.weight", "model.layers.2.mlp.up_proj.weight", "visual.patch.weight"]
)
def test_l10_other_heads_and_towers_may_lie_there(name: str, model: Path, tmp_path: Path) -> None:
    loaded = load_pretrained(AutoModelForCausalLM, changed(model, tmp_path, added(name)))
    want = load_pretrained(AutoModelForCausalLM, str(model)).state_dict()
    assert all(torch.equal(value, want[key]) for key, value in loaded.state_dict().items())


def test_l10_a_head_that_comes_from_elsewhere_may_be_missing(model: Path) -> None:
    kind = AutoModelForSequenceClassification
    load_pretrained(kind, str(model), fresh=("score",), num_labels=1)
    with pytest.raises(ValueError, match=r"which would start at random: score\.weight"):
        load_pretrained(kind, str(model), num_labels=1)
