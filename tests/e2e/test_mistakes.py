"""A mistake of the user: one clear message and exit code 1 at once; a broken reward: the end in the first batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.stack_runs import Workspace, make_workspace, start_run
from support.tiny_models import tiny_qwen3

WRONG_SIGNATURE = "def reward_func(text):\n    return [0.0]\n"
RAISES = "def reward_func(queries, prompts, labels):\n    raise RuntimeError('boom-3')\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    path = tmp_path_factory.mktemp("mistakes")
    (path / "wrong.py").write_text(WRONG_SIGNATURE)
    return make_workspace(path, tiny_qwen3(path / "tiny"))


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--actor.model_name_or_path", "./no-model"], ["--actor.model_name_or_path", "./no-model", "not found"]),
        (["--data.prompt_dataset", "no-data.jsonl"], ["--data.prompt_dataset", "not found", "no-data.jsonl"]),
        (["--data.input_key", "question"], ["question", "prompt, label"]),  # B040
        (["--data.label_key", "answer"], ["answer", "prompt, label"]),
        (["--reward.remote_url", "no_reward.py"], ["--reward.remote_url", "not found", "no_reward.py"]),
        (["--reward.remote_url", "wrong.py"], ["wrong.py", "reward_func(queries, prompts, labels)"]),
    ],
    ids=["model", "dataset", "input key", "label key", "reward file", "reward signature"],
)
def test_one_message_before_anything_starts(workspace: Workspace, flags: list[str], parts: list[str]) -> None:
    run = start_run(workspace, *flags)
    assert run.wait(120) == 1
    message = run.text.strip().splitlines()[-1]
    for part in parts:
        assert part in message
    assert "Traceback" not in run.text
    assert "Started a local Ray" not in run.text
    assert run.left_over() == []


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
@pytest.mark.timeout(400)
def test_reward_that_raises_ends_the_run_in_the_first_batch(workspace: Workspace, tmp_path: Path) -> None:  # B067
    (tmp_path / "raises.py").write_text(RAISES)
    run = start_run(workspace, "--reward.remote_url", str(tmp_path / "raises.py"))
    assert run.wait(300) == 1
    assert "boom-3" in run.text
    assert "raises.py" in run.text
    assert "step 1" not in run.text
    assert run.left_over() == []
