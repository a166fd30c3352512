"""The pipeline example: its commands keep the rules, and without RL it runs to its end in a small size."""

from __future__ import annotations

from pathlib import Path

import pipeline
import pytest
import stages

from openrlhf.launcher.command_line import check_config
from openrlhf.launcher.commands import COMMANDS, unsupported
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse

PLACES = stages.Places(Path("/p"))
COMMAND_LINES = {
    "sft": stages.sft_command(PLACES),
    "reward_model": stages.reward_model_command(PLACES),
    "rl_in_cluster": stages.rl_command(PLACES, "rl_in_cluster", "sft", stages.in_cluster(PLACES)),
    "rl_remote": stages.rl_command(
        PLACES, "rl_remote", "rl_in_cluster", {"reward.remote_url": "http://h:1/get_reward"}
    ),
    "server": stages.server_command(PLACES),
    "dpo": stages.dpo_command(PLACES, "rl_remote", 10),
}


@pytest.mark.parametrize("stage", COMMAND_LINES)
def test_command(stage: str) -> None:
    words = COMMAND_LINES[stage]
    command = COMMANDS[words[2].removeprefix("openrlhf.cli.")]
    asked = parse(command, words[3:]).config
    config, violations, _ = check_config(command, asked, Machine(gpus=0))
    assert [str(v) for v in violations] == []
    assert unsupported(command, asked, config) == []


def test_wrong_answers_are_wrong() -> None:
    import random

    rng = random.Random(0)
    found = {stages.wrong_answer("sort 63450", "03456", rng) for _ in range(500)}
    assert "03456" not in found
    assert {len(answer) for answer in found} == set(range(1, 10))
    assert "63450" in found


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_sft_then_reward_model_then_dpo(tmp_path: Path) -> None:
    sizes = stages.Sizes(sft=60, reward_model=120, dpo=10, held_out=64)
    found = pipeline.pipeline(stages.Places(tmp_path), sizes, seed=1, with_rl=False)
    assert [m.stage for m in found] == ["sft", "reward_model", "dpo"]
    # the reward model's 0.95 takes 600 steps: tests/proof/test_pipeline.py
    assert {m.stage for m in found if not m.ok} <= {"reward_model"}
    assert stages.logged(stages.Places(tmp_path), "reward_model", "eval/acc")[-1] > 0.7


def test_x01_only_what_a_pipeline_made_is_removed(tmp_path: Path) -> None:
    stages.clear(stages.Places(root=tmp_path / "out"))
    (tmp_path / "out" / "sft").mkdir()
    (tmp_path / "out" / "notes.md").write_text("mine")
    stages.clear(stages.Places(root=tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [stages.MARK, "notes.md"]
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(SystemExit, match="holds files that no pipeline made"):
        stages.clear(stages.Places(root=tmp_path))
