"""What a run refuses in its flags, the plan refuses in the same words."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from openrlhf.launcher.command_line import prepare, usage_message
from openrlhf.launcher.commands import REFUSED, TRAIN_PPO_RAY
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.main import main
from openrlhf.launcher.parsing import UsageError
from support.broken_rl_commands import BASE, CASES
from support.flag_values import another

UNSUPPORTED = [path for path, (commands, _) in REFUSED.items() if TRAIN_PPO_RAY.name in commands]
UNSUPPORTED = [path for path in UNSUPPORTED if path in TRAIN_PPO_RAY.flags]


def spelled(path: str) -> str:
    """A flag with a value that it does not have by default."""
    value = another(TRAIN_PPO_RAY.flags[path])
    values = () if value is True else value if isinstance(value, tuple) else (value,)
    return shlex.join([f"--{path}", *map(str, values)])


LINES = [*dict.fromkeys(case[0] for case in CASES), *map(spelled, UNSUPPORTED)]


@pytest.mark.parametrize("gpus", [8, 0])
@pytest.mark.parametrize("line", LINES)
def test_l12_the_plan_refuses_what_the_run_refuses(
    line: str, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openrlhf.launcher.plan.command.detect_machine", lambda: Machine(gpus=gpus, nodes=None))
    argv = shlex.split(f"{BASE} {line}")
    try:
        prepare(TRAIN_PPO_RAY, argv, Machine(gpus=gpus, nodes=None))
    except UsageError as error:
        expected = usage_message(TRAIN_PPO_RAY, error)
    else:
        expected = None
    assert expected is None or (main(["plan", "--", *argv]) == 2 and capsys.readouterr().err == expected + "\n")
    assert expected is not None or gpus == 0  # some mistakes are none on a CPU


def test_l12_the_lines_break_something() -> None:
    assert "--vllm.sync_with_ray" in LINES
    assert "--ds.ring_attn_size 3" in LINES
    assert len(LINES) > 80
