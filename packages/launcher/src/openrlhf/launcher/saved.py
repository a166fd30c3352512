"""A configuration as TOML: printed on request, saved beside the checkpoints, read back by `--config`."""

from __future__ import annotations

import json
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
STATE_FILE = "trainer.json"
"""In a checkpoint's `state`: where the trainer stood."""
RUN = "run"
"""In that file: the name by which loggers know the run."""

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


def keep_run_name(config: TrainPPOConfig | SupervisedConfig) -> TrainPPOConfig | SupervisedConfig:
    """A run that goes on logs under the name that it had, unless `--logger.wandb.run_name` gives it another."""
    if not config.ckpt.load_enable or config.logger.wandb.run_name != AUTO_NAME:
        return config
    saved = _newest_state(config, FILE)
    if saved is None:
        return config
    name = tomllib.loads(saved.read_text(encoding="utf-8"))["logger"]["wandb"]["run_name"]
    return build(config, {"logger.wandb.run_name": name})


def saved_run_id(config: TrainPPOConfig | SupervisedConfig) -> str | None:
    """The name by which loggers know the run that this one goes on with; None for a new run."""
    saved = _newest_state(config, STATE_FILE) if config.ckpt.load_enable else None
    return None if saved is None else json.loads(saved.read_text(encoding="utf-8")).get(RUN)


def _newest_state(config: TrainPPOConfig | SupervisedConfig, name: str) -> Path | None:
    newest = CheckpointStore(Path(config.ckpt.path).expanduser()).latest()
    path = None if newest is None else newest.path / "state" / name
    return path if path is not None and path.is_file() else None


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
