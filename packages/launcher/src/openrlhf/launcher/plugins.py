"""Losses and advantages of the user's, given by file: `--actor.loss_path`, `--algo.advantage.path`.

A file is read once, by the controller, tried there, and travels by content to the ranks that call its function, as
files with agents and rewards do. A copy lies in every checkpoint, so that a run which goes on can tell that it changed.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.agents.files import CodeFile, CodeFileError, read_code
from openrlhf.agents.modules import load_module
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.terms import with_flags

log = logging.getLogger(__name__)

LOSS = "actor.loss_path"
ADVANTAGES = "algo.advantage.path"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A function in a file of the user's. flag: by which it was given, without its dashes."""

    flag: str
    code: CodeFile
    name: str

    def __str__(self) -> str:
        return f"--{self.flag}: {self.name} of {self.code.path}"

    def load(self) -> Callable[..., Any]:
        """The function; runs the file. Raises CodeFileError with what is wrong."""
        try:
            module = load_module(self.code)
        except Exception as error:
            raise CodeFileError(
                f"--{self.flag}: {self.code.path} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        function = getattr(module, self.name, None)
        if not callable(function):
            own = ast.walk(ast.parse(self.code.source))
            functions = sorted(node.name for node in own if isinstance(node, ast.FunctionDef))
            there = f"it has {', '.join(functions)}" if functions else "it has none"
            raise CodeFileError(
                f"--{self.flag}: {self.code.path} has no function {self.name}; {there}. Another name is given as "
                f"{self.code.name}:function"
            )
        return function


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """Those of a run."""

    loss: Plugin | None = None
    advantages: Plugin | None = None

    def __iter__(self) -> Iterator[Plugin]:
        return (plugin for plugin in (self.loss, self.advantages) if plugin is not None)

    def sources(self) -> dict[str, str]:
        """Flag -> content of its file: what a checkpoint keeps."""
        return {plugin.flag: plugin.code.source for plugin in self}


NO_PLUGINS = Plugins()


def read_plugins(config: TrainPPOConfig) -> Plugins:
    """Read the files; nothing of them runs. Raises CodeFileError for one that is missing or no Python."""
    return Plugins(
        loss=_read(LOSS, config.actor.loss_path, "policy_loss"),
        advantages=_read(ADVANTAGES, config.algo.advantage.path, "compute_advantages"),
    )


def split_path(value: str, default: str) -> tuple[str, str]:
    """`file.py` or `file.py:name` -> file, name."""
    file, colon, name = value.rpartition(":")
    return (file, name) if colon and name.isidentifier() else (value, default)


def _read(flag: str, value: str | None, default: str) -> Plugin | None:
    if value is None:
        return None
    file, name = split_path(value, default)
    code = read_code(file, f"--{flag}")
    try:
        ast.parse(code.source, filename=code.path)
    except (SyntaxError, ValueError) as error:
        raise CodeFileError(f"--{flag}: syntax error in {code.path}: {error}") from error
    return Plugin(flag=flag, code=code, name=name)


def check_plugins(config: TrainPPOConfig, plugins: Plugins) -> None:
    """Try the functions on toy batches. Raises CodeFileError with why one cannot be used."""
    from openrlhf.core.plugins import PluginError, check_advantages, check_policy_loss

    advantage = config.algo.advantage
    correction = advantage if advantage.is_correction_enable else None
    agg_constant = float(config.rollout.max_new_tokens or config.data.max_len)
    for plugin in plugins:
        function = plugin.load()
        try:
            if plugin.flag == LOSS:
                check_policy_loss(function, config.actor, correction, agg_constant)
            else:
                check_advantages(function)
        except PluginError as error:
            raise CodeFileError(f"{plugin} {with_flags(str(error))}") from error
        log.info("%s passed its checks", plugin)


def warn_of_changes(saved: Path, sources: dict[str, str]) -> None:
    """Say what is another file than when the checkpoint in `saved` was written."""
    for flag in (LOSS, ADVANTAGES):
        copy = saved / f"{flag}.py"
        before, now = copy.read_text(encoding="utf-8") if copy.is_file() else None, sources.get(flag)
        if before == now:
            continue
        what = "was not given" if before is None else "was given" if now is None else "was another file"
        log.warning("--%s %s when the checkpoint was written%s", flag, what, f" (its copy: {copy})" if before else "")
