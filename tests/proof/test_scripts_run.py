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
from support.example_scripts import SCRIPTS, one_step, write_inputs
from support.launcher_reward_model import tiny_reward_model
from support.tiny_models import tiny_qwen3
from support.vision_models import tiny_vision

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(600)]

NAMES = [
    "train_ppo_ray_hybrid_engine",
    "train_ppo_with_reward_fn",
    "train_dapo_ray_hybrid_engine",
    "train_reinforce_baseline_hybrid_engine",
    "train_reinforce_baseline_ray_agent_async",
]


@pytest.mark.parametrize("name", NAMES)
def test_script_trains_one_step(name: str, tmp_path: Path) -> None:
    places = {
        "MODEL": tiny_qwen3(tmp_path / "model"),
        "REWARD_MODEL": tiny_reward_model(tmp_path / "reward_model"),
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
    script = SCRIPTS / f"{name}.sh"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | write_inputs(folder) | places | {"PATH": path}
    command = ["bash", str(script), *one_step(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "done: 1 steps, 1 optimiser steps" in done.stdout
    return json.loads((folder / "out" / "config.json").read_text())
