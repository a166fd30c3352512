"""The recipes of supervised training, started as they stand, take a step on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.supervised_runs import write_data
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "scripts"
FLAGS = {
    "train_sft": ["--data.input_key", "input", "--data.output_key", "output"],
    "train_rm": ["--data.prompt_key", "prompt"],
    "train_dpo": ["--data.prompt_key", "prompt"],
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_recipe_takes_a_step(name: str, tmp_path: Path) -> None:
    write_data(tmp_path, rows=4)
    data = tmp_path / ("sft.jsonl" if name == "train_sft" else "pairs.jsonl")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODEL": tiny_qwen3(tmp_path / "model"),
        "DATA": str(data),
        "OUTPUT": str(tmp_path / "out"),
        "GPUS": "1",
    }
    command = ["bash", str(SCRIPTS / f"{name}.sh"), *FLAGS[name]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    assert "done: 1 optimiser steps" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
