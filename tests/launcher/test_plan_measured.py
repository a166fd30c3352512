"""The plan's parameters, gradients and optimiser states against what real learner ranks hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.launcher.plan.memory import gradient_bytes, optimizer_bytes, parameter_bytes
from openrlhf.launcher.plan.shape import read_shape
from support.launcher_memory_cases import STAGES
from support.learner_ranks import run_ranks

QUICKSTART = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 261,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
WORLD = 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, int]]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("ranks")
    Qwen3ForCausalLM(Qwen3Config(**QUICKSTART)).save_pretrained(folder / "quickstart")
    return folder, run_ranks("support.launcher_memory_cases", ["step_memory"], folder, WORLD)["step_memory"]


@pytest.mark.ranks
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("stage", STAGES)
def test_prediction_is_within_a_tenth(stage: int, measured: tuple[Path, list[dict[int, int]]]) -> None:
    folder, ranks = measured
    assert json.loads((folder / "quickstart" / "config.json").read_text())["model_type"] == "qwen3"
    count = read_shape(str(folder / "quickstart")).parameters
    functions = (parameter_bytes, gradient_bytes, optimizer_bytes)
    predicted = sum(f(count, stage=stage, itemsize=4, world=WORLD) for f in functions)
    for held in ranks:
        assert predicted == pytest.approx(held[stage], rel=0.1)
