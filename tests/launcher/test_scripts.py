"""The example scripts: each hands its program a command line that parses and breaks no rule on 8 GPUs a node."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import dataclass
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
    "train_lora_one_gpu",
    "train_on_policy_distill",
    "train_ppo_ray_hybrid_engine",
    "train_ppo_ray_slurm",
    "train_ppo_with_reward_fn",
    "train_reinforce_baseline_hybrid_engine",
    "train_reinforce_baseline_ray_agent_async",
    "train_rm",
    "train_sft",
    "train_vlm_math_hybrid_engine",
}
EXTRA = ["--ds.param_dtype", "bf16"]
"""Handed to each script by the tests; every command has it."""


@dataclass(frozen=True)
class Call:
    """The command that a script starts, the flags it gives, and the folder it does so in."""

    command: Command
    argv: list[str]
    folder: str


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Call]:
    """What each script calls, with programs on PATH that write down how they were called instead of running."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("python3", "torchrun", "openrlhf-launch"):
        program = folder / name
        program.write_text('#!/bin/sh\nprintf \'%s\\0\' "$PWD" "$@"\n', encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return {script.stem: called(script, environment) for script in SCRIPTS}


def called(script: Path, environment: dict[str, str]) -> Call:
    words = ["bash", str(script), *EXTRA]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    folder, *words = done.stdout.removesuffix("\0").split("\0")
    if words[0] == "slurm":
        return Call(TRAIN_PPO_RAY, words[words.index("--") + 1 :], folder)
    module = next(word for word in words if word.startswith("openrlhf.cli."))
    return Call(COMMANDS[module.removeprefix("openrlhf.cli.")], words[words.index(module) + 1 :], folder)


def test_no_script_is_missing() -> None:
    assert {script.stem for script in SCRIPTS} == NAMES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script: Path, calls: dict[str, Call]) -> None:
    call = calls[script.stem]
    config = parse(call.command, call.argv).config
    _, violations, notes = check_config(call.command, config, Machine(gpus=8, nodes=None))
    assert [str(v) for v in violations] == []
    assert [note for note in notes if note.startswith("warning")] == []
    assert Path(call.folder) == ROOT
    assert os.access(script, os.X_OK)
    assert call.argv[-2:] == EXTRA  # a user's flags come last, so they win
    files = [word for word in call.argv if word.startswith("examples/")]
    assert [file for file in files if not (ROOT / file).is_file()] == []
