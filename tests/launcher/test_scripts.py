"""The example scripts: each hands its program a command line that parses and breaks no rule on 8 GPUs a node."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from openrlhf.launcher.command_line import check_config
from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY, Command
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import parse

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "scripts").glob("*.sh"))
NAMES = {
    "serve_remote_rm",
    "train_dapo_ray_hybrid_engine",
    "train_dpo",
    "train_ppo_ray_hybrid_engine",
    "train_ppo_ray_slurm",
    "train_ppo_with_reward_fn",
    "train_reinforce_baseline_hybrid_engine",
    "train_reinforce_baseline_ray_agent_async",
    "train_rm",
    "train_sft",
    "train_vlm_math_hybrid_engine",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """PATH with programs that write down how they were called instead of running."""
    for name in ("python3", "torchrun", "openrlhf-launch"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf \'%s\\0\' "$PWD" "$@"\n', encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def called(script: Path, environment: dict[str, str], *extra: str) -> tuple[Command, list[str], str]:
    """The command that a script starts, the flags it gives, and the folder it does so in."""
    done = subprocess.run(
        ["bash", str(script), *extra], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    folder, *words = done.stdout.removesuffix("\0").split("\0")
    if words[0] == "slurm":
        return TRAIN_PPO_RAY, words[words.index("--") + 1 :], folder
    module = next(word for word in words if word.startswith("openrlhf.cli."))
    return COMMANDS[module.removeprefix("openrlhf.cli.")], words[words.index(module) + 1 :], folder


def test_no_script_is_missing() -> None:
    assert {script.stem for script in SCRIPTS} == NAMES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script: Path, environment: dict[str, str]) -> None:
    command, argv, folder = called(script, environment)
    _, violations, notes = check_config(command, parse(command, argv).config, Machine(gpus=8, nodes=None))
    assert [str(v) for v in violations] == []
    assert [note for note in notes if note.startswith("warning")] == []
    assert Path(folder) == ROOT
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_flags_given_to_a_script_win(script: Path, environment: dict[str, str]) -> None:
    command, argv, _ = called(script, environment, "--data.max_len", "31")
    assert parse(command, argv).config.data.max_len == 31


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_files_that_a_script_names_exist(script: Path, environment: dict[str, str]) -> None:
    _, argv, _ = called(script, environment)
    files = [word for word in argv if word.startswith("examples/")]
    assert [file for file in files if not (ROOT / file).is_file()] == []
