"""No flag is accepted and ignored: what nothing reads is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.command_line import prepare
from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY, unsupported
from openrlhf.launcher.commands import REFUSED as UNSUPPORTED
from openrlhf.launcher.flags import build, values_of
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import UsageError
from support.flag_values import another

PACKAGES = Path(__file__).parents[2] / "packages"
DESCRIPTIONS = re.compile(  # modules that describe, check or translate flags without honouring them
    r"(?<!/zero)/config\.py$|/(supervised_config|unsupported|resolve|old_names|commands|flags|suggestions)\.py$|/(rules|plan)/"
)


REFUSED = [
    (COMMANDS[command], path, reason)
    for path, (commands, reason) in UNSUPPORTED.items()
    for command in commands
    if path in COMMANDS[command].flags
]


@pytest.mark.parametrize(("command", "path", "reason"), REFUSED, ids=lambda x: getattr(x, "name", x))
def test_a_refused_flag_is_named_with_the_reason(command: Any, path: str, reason: str) -> None:
    config = build(command.defaults, {path: another(command.flags[path])})
    (message,) = unsupported(command, config, config)
    assert message.startswith(f"--{path}")
    assert message.endswith(f"is not supported: {reason}")
    assert unsupported(command, command.defaults, command.defaults) == []


def test_a_flag_that_this_machine_switches_off_is_not_refused() -> None:
    asked = build(TRAIN_PPO_RAY.defaults, {"vllm.sync_with_ray": True})
    assert unsupported(TRAIN_PPO_RAY, asked, TRAIN_PPO_RAY.defaults) == []


def test_refusals_and_broken_rules_come_in_one_message() -> None:
    with pytest.raises(UsageError) as caught:
        prepare(TRAIN_PPO_RAY, ["--use_ms", "--vllm.sync_with_ray", "--rollout.temperature", "0"], Machine(gpus=0))
    text = str(caught.value)
    assert "--use_ms is not supported" in text
    assert "--vllm.sync_with_ray is not supported" in text
    assert "--rollout.temperature 0.0: it must be more than 0" in text


def test_every_row_names_a_flag() -> None:
    known = {path for command in COMMANDS.values() for path in values_of(command.defaults)}
    assert set(UNSUPPORTED) <= known


@pytest.fixture(scope="module")
def code() -> str:
    files = [file for file in PACKAGES.rglob("src/**/*.py") if not DESCRIPTIONS.search(str(file))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("path", sorted({f.path for c in COMMANDS.values() for f in c.flags.values()}))
def test_every_flag_is_read_or_refused(path: str, code: str) -> None:
    field = path.rsplit(".", 1)[-1]
    assert path in UNSUPPORTED or re.search(rf"\.{field}\b", code)
