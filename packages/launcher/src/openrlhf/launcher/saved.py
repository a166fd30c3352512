"""A configuration as TOML: printed on request, saved beside the checkpoints, read back by `--config`."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from openrlhf.launcher.commands import Command
from openrlhf.launcher.config import AUTO_NAME, TrainPPOConfig
from openrlhf.launcher.flags import Flag, build, values_of
from openrlhf.launcher.redaction import MASK, redact_value
from openrlhf.launcher.supervised_config import SupervisedConfig
from openrlhf.learner.checkpoint_dir import CheckpointStore

FILE = "config.toml"

NONE = "None"
"""How a file says None where the default is something else; TOML has no null."""


def config_toml(command: Command, config: object) -> str:
    """The configuration as a TOML file for `--config`. Secrets are masked, passwords in URLs and in JSON too.

    A masked secret is not read back: `--config` asks for those that are parts of a value.
    """
    tables: dict[str, list[str]] = {}
    values = values_of(config)
    for flag in command.flags.values():
        if not flag.off:
            table, _, key = flag.path.rpartition(".")
            tables.setdefault(table, []).append(_line(flag, key, values[flag.path]))
    blocks = [f"# {command.program} --config THIS_FILE"]
    for table, lines in sorted(tables.items(), key=lambda item: item[0] != ""):
        blocks.append("\n".join([f"[{table}]", *lines] if table else lines))
    return "\n\n".join(blocks) + "\n"


def save_config(command: Command, config: object, folder: str | Path) -> Path:
    """Write the configuration to `config.toml` in `folder`, complete or not at all; returns the file."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{FILE}.{os.getpid()}")
    draft.write_text(config_toml(command, config), encoding="utf-8")
    draft.replace(path)
    return path


def keep_run_name(config: TrainPPOConfig | SupervisedConfig) -> TrainPPOConfig | SupervisedConfig:
    """A run that goes on logs under the name that it had, unless `--logger.wandb.run_name` gives it another."""
    if not config.ckpt.load_enable or config.logger.wandb.run_name != AUTO_NAME:
        return config
    newest = CheckpointStore(Path(config.ckpt.path).expanduser()).latest()
    saved = None if newest is None else newest.path / "state" / FILE
    if saved is None or not saved.is_file():
        return config
    name = tomllib.loads(saved.read_text(encoding="utf-8"))["logger"]["wandb"]["run_name"]
    return build(config, {"logger.wandb.run_name": name})


def _line(flag: Flag, key: str, value: Any) -> str:
    if value is None and flag.default is None:
        return f"# {key} = None"
    if value is None:
        return f"{key} = {json.dumps(NONE)}"
    if flag.secret:
        return f"{key} = {json.dumps(MASK)}"
    if value in flag.shape.words.values():
        return f"{key} = {json.dumps(flag.show(value))}"
    return f"{key} = {_toml(redact_value(flag.path, value))}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
