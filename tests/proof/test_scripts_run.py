"""The example scripts of RL training, each run for one optimiser step on CPU with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.colours import write_rows
from support.launcher_reward_model import tiny_reward_model
from support.tiny_models import tiny_qwen3
from support.vision_models import tiny_vision

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
NAMES = [
    "train_ppo_ray_hybrid_engine",
    "train_ppo_with_reward_fn",
    "train_dapo_ray_hybrid_engine",
    "train_reinforce_baseline_hybrid_engine",
    "train_reinforce_baseline_ray_agent_async",
]
SMALL = {
    "data.max_len": 256,
    "rollout.max_new_tokens": 8,
    "rollout.batch_size": 4,
    "rollout.n_samples_per_prompt": 4,
    "rollout.micro_batch_size": 4,
    "rollout.vllm_generate_batch_size": 8,
    "train.batch_size": 4,
    "train.micro_batch_size": 4,
    "train.max_tokens_per_gpu": 1024,
    "reward.overlong_buffer_len": 4,
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "critic.num_gpus_per_node": 1,
    "reward.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
}
"""In place of a script's own values, where it has the flag."""

UNEQUAL_REWARDS = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(i % 2) for i in range(len(queries))]}
"""


@pytest.mark.parametrize("name", NAMES)
def test_script_trains_one_step(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1?", "label": str(i + 1)} for i in range(8)]
    rows = [row | {"context_messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {
        "MODEL": tiny_qwen3(tmp_path / "model"),
        "REWARD_MODEL": tiny_reward_model(tmp_path / "reward_model"),
        "PROMPTS": str(tmp_path / "prompts.jsonl"),
    }
    assert run_one_step(name, tmp_path, places)["model_type"] == "qwen3"


def test_script_with_images_trains_one_step(tmp_path: Path) -> None:
    places = {
        "MODEL": tiny_vision("qwen3_5", tmp_path / "model"),
        "PROMPTS": str(write_rows(tmp_path / "data", 8, 1)),
    }
    assert run_one_step("train_vlm_math_hybrid_engine", tmp_path, places)["model_type"] == "qwen3_5"


def run_one_step(name: str, folder: Path, places: dict[str, str]) -> dict[str, Any]:
    """Run a script for one optimiser step; returns the exported model's configuration."""
    (folder / "reward.py").write_text(UNEQUAL_REWARDS)
    places = places | {"REWARD": str(folder / "reward.py"), "OUTPUT": str(folder / "out")}
    script = SCRIPTS / f"{name}.sh"
    small = [
        word for flag, value in SMALL.items() if f"--{flag} " in script.read_text() for word in (f"--{flag}", value)
    ]
    environment = os.environ | places | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if "--algo.dynamic_filtering_enable" in script.read_text():  # a random model gets the same score every time
        small += ["--algo.dynamic_filtering_range", -1.0, 2.0]
    command = ["bash", str(script), *map(str, small), "--train.max_steps", "1", "--vllm.num_engines", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "done: 1 steps, 1 optimiser steps" in done.stdout
    return json.loads((folder / "out" / "config.json").read_text())
