"""`openrlhf-launch eval` gives the numbers that a run logged for the same weights."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.stack_runs import make_workspace
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(900)]

EVALUATION = "--eval.n_samples_per_prompt 4 --eval.temperature 1.0"


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """The evaluations of a run by step, without their times."""
    rows = [json.loads(line) for path in folder.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    return {row["step"]: metrics(row) for row in rows if any(name.startswith("eval/") for name in row)}


def metrics(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def test_the_same_weights_have_the_same_numbers(tmp_path: Path) -> None:
    space = make_workspace(tmp_path, tiny_qwen3(tmp_path / "tiny"))
    flags = [*space.flags, "--eval.dataset", str(tmp_path / "prompts.jsonl"), *EVALUATION.split()]
    flags += ["--actor.adam.lr", "1e-3"]
    own = ["--eval.at_start", "--eval.steps", "100", "--logger.tensorboard_dir", str(tmp_path / "logs")]
    train = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags, *own]
    told = subprocess.run(train, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "Evaluation on 'default': pass@1" in told[told.index("done: 2 steps") :]
    command = shlex.split(told[told.index("report: openrlhf-launch") :].splitlines()[0].removeprefix("report: "))
    subprocess.run([sys.executable, "-m", "openrlhf.launcher.main", *command[1:]], cwd=tmp_path, check=True)
    [page] = (tmp_path / "logs").rglob("report.html")
    assert 'id="run-0-step-2"' in page.read_text()
    of_run = logged(tmp_path / "logs")
    assert list(of_run) == [0, 2]
    assert of_run[0] != of_run[2]
    for step, model in ((0, space.model), (2, tmp_path / "model_out")):
        command = [sys.executable, "-m", "openrlhf.launcher.main", "eval", "--json", "--", *flags]
        command += ["--actor.model_name_or_path", str(model)]
        done = subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True)
        assert metrics(json.loads(done.stdout)) == of_run[step]
