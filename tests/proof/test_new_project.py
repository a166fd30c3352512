"""What `openrlhf-agents new` writes trains on the real stack as it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from report import read_events

from openrlhf.agents.cli import main
from support.stack_runs import make_workspace, start_run
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(900), pytest.mark.alarms("all_truncated")]

FLAGS = {"environment.py": "--train.agent_func_path", "reward.py": "--reward.remote_url"}


@pytest.mark.parametrize("file", list(FLAGS))
def test_a_new_project_trains(tmp_path: Path, file: str) -> None:
    project = tmp_path / "my-project"
    with pytest.raises(SystemExit) as stop:
        main(["new", str(project)])
    assert stop.value.code == 0
    written = {path.name: path.read_bytes() for path in project.iterdir()}
    workspace = make_workspace(tmp_path / "run", tiny_qwen3(tmp_path / "tiny"))
    workspace.without = ("reward.remote_url", "data.prompt_dataset", "data.max_len")
    board = tmp_path / "tensorboard"
    run = start_run(
        workspace,
        *("--data.prompt_dataset", str(project / "prompts.jsonl"), FLAGS[file], str(project / file)),
        *("--data.max_len", "160", "--train.num_episodes", "2", "--logger.tensorboard_dir", str(board)),
    )
    assert run.wait(600) == 0, run.text
    assert run.left_over() == []
    metrics = {tag: [p.value for p in points] for tag, points in read_events(board).items()}
    assert len(metrics["train/reward"]) == 2
    assert all(math.isfinite(value) for values in metrics.values() for value in values)
    if file == "environment.py":
        assert metrics["train/attempts"] == [3.0, 3.0]  # a random model does not name a fruit
    assert {path.name: path.read_bytes() for path in project.iterdir() if path.is_file()} == written
