"""The table of flags that the command line promises: one row per flag, in `tests/launcher/flags/<command>.tsv`."""

from __future__ import annotations

import ast
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.parsing import parse

FOLDER = Path(__file__).parent.parent / "launcher" / "flags"
COMMANDS = ("train_ppo_ray", "train_sft", "train_rm", "train_dpo", "serve_rm", "lora_combiner")

DECIDED = {
    ("serve_rm", "host"): "127.0.0.1",  # loopback unless asked otherwise
}
"""Defaults that this system deliberately has otherwise."""


@dataclass(frozen=True)
class Row:
    """One promised flag."""

    command: str
    name: str
    kind: str
    default: Any
    choices: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.command}-{self.name}"


def rows(command: str) -> list[Row]:
    """The promised flags of a command."""
    with (FOLDER / f"{command}.tsv").open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [_row(command, line) for line in table]


def all_rows() -> list[Row]:
    """The promised flags of all commands."""
    return [row for command in COMMANDS for row in rows(command)]


def _row(command: str, line: dict[str, str]) -> Row:
    name, choices = line["name"], tuple((line["choices"] or "").split(",")) if line["choices"] else ()
    return Row(command, name, line["type"], DECIDED.get((command, name), _value(line["default"])), choices)


def _value(text: str) -> Any:
    if text == "inf":
        return inf
    value = None if text == "(required)" else ast.literal_eval(text)
    return tuple(value) if isinstance(value, list) else value


def parse_train_ppo(argv: Sequence[str]) -> TrainPPOConfig:
    """The configuration of `train_ppo_ray`, before `resolve`."""
    return parse(TRAIN_PPO_RAY, argv).config
