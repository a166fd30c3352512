"""The folders that a run writes into: named, held and tried at its start, given back at its end.

What may be written, replaced and removed in them is decided in `openrlhf.learner.folders`.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from openrlhf.launcher.commands import Command
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.record.place import AUTO, NONE, record_folder
from openrlhf.launcher.saved import FILE, config_toml
from openrlhf.launcher.supervised_config import LoraCombinerConfig, SupervisedRun, TrainDPOConfig
from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.folders.lock import hold
from openrlhf.learner.folders.publish import in_the_way, publish, recover, taken_message, write_text
from openrlhf.learner.folders.trial import try_folder

C = TypeVar("C", bound=TrainPPOConfig | SupervisedRun)

log = logging.getLogger(__name__)

CONFIG_NAMES = (FILE, f"openrlhf_{FILE}")
"""The resolved configuration beside the export and the logs; the second where a user has a file of the first name."""
PATHS = ("ckpt.output_dir", "ckpt.path", "logger.tensorboard_dir", "logger.record_dir", "data.curriculum_export")


@dataclass(frozen=True, kw_only=True)
class Output:
    """A folder that a run writes into. flag: how the user names it. model: it gets an exported model."""

    what: str
    flag: str
    path: Path
    model: bool = False


def absolute(config: C) -> C:
    """Output paths as seen from this process: `~` and relative ones resolved against its working directory."""
    changes = {}
    for name in PATHS:
        section, field = name.split(".")
        value = getattr(getattr(config, section), field, None)
        if value is not None and (name != "logger.record_dir" or value not in (AUTO, NONE)):
            changes[name] = str(Path(os.path.abspath(Path(value).expanduser())))
    return build(config, changes)


def outputs(config: TrainPPOConfig | SupervisedRun) -> list[Output]:
    """All folders of a run; `config` has absolute paths."""
    found = [Output(what="model", flag="--ckpt.output_dir", path=Path(config.ckpt.output_dir), model=True)]
    if isinstance(config, TrainPPOConfig) and config.has_critic and config.critic.save_value_network:
        path = Path(critic_folder(config.ckpt.output_dir))
        found.append(Output(what="critic", flag="--critic.save_value_network", path=path, model=True))
    found.append(Output(what="checkpoints", flag="--ckpt.path", path=Path(config.ckpt.path)))
    if config.logger.tensorboard_dir is not None:
        path = Path(config.logger.tensorboard_dir) / config.logger.wandb.run_name
        found.append(Output(what="logs", flag="--logger.tensorboard_dir", path=path))
    record = record_folder(config) if isinstance(config, TrainPPOConfig) else None
    if record is not None:
        found.append(Output(what="record", flag="--logger.record_dir", path=record))
    return found


def critic_folder(output_dir: str) -> str:
    """Where the critic goes."""
    return output_dir.rstrip("/") + "_critic"


@contextmanager
def hold_outputs(command: Command[Any], config: TrainPPOConfig | SupervisedRun) -> Iterator[None]:
    """Hold the run's folders for the length of the block; `config` has absolute paths.

    They are printed, made, tried, and get the resolved configuration. What is wrong with them is found here, before a
    model is loaded.

    Raises:
        ValueError: a folder is in use by another run, cannot be written, lacks room, is where a model is read from, or
            holds files that no run wrote where this one would put its own.
    """
    found, models = outputs(config), _models(config)
    report(found)
    room = model_bytes(models[0]) if models else 0
    with ExitStack() as held:
        for output in found:
            _refuse_inputs(output, models)
            held.callback(hold(output.path, output.flag).release)
            writes = output.model or (config.ckpt.save_steps > 0 and output.what == "checkpoints")
            try_folder(output.path, output.flag, room=room if writes else 0)
            if output.model:
                recover(Path(os.path.realpath(output.path)))
                check_export(output.path, output.flag)
            elif output.what == "checkpoints":
                CheckpointStore(output.path).check(resume=config.ckpt.load_enable)
        for output in found:
            if output.what in ("model", "logs"):
                write_text(output.path, CONFIG_NAMES, config_toml(command, config), part="run")
        yield


@contextmanager
def hold_merged(config: LoraCombinerConfig) -> Iterator[Path]:
    """The folder of the merged model, absolute, held and tried like that of a run. Raises ValueError."""
    output = Output(
        what="model", flag="--output_path", path=Path(config.output_path).expanduser().absolute(), model=True
    )
    report([output])
    _refuse_inputs(output, [config.model_path, config.lora_path])
    lock = hold(output.path, output.flag)
    try:
        try_folder(output.path, output.flag, room=model_bytes(config.model_path))
        recover(Path(os.path.realpath(output.path)))
        check_export(output.path, output.flag)
        yield output.path
    finally:
        lock.release()


def check_export(folder: Path, flag: str) -> None:
    """ValueError when an export into the folder would replace, or be loaded together with, what no run wrote."""
    real = Path(os.path.realpath(folder))
    if trouble := in_the_way(real, []):
        raise ValueError(taken_message(real, trouble, flag))


def try_export_settings(output_dir: str, model: str, tokenizer: Any) -> None:
    """Write all of an export but the weights into the folder, and remove it again: before any model is loaded.

    Raises ValueError with what cannot be saved, or is in the way.
    """
    from openrlhf.learner.settings_files import try_settings

    try:
        with publish(output_dir, trial=True, name="--ckpt.output_dir") as folder:
            try_settings(model, tokenizer, folder)
    except OSError as error:
        raise ValueError(f"--ckpt.output_dir {output_dir!r} cannot be written: {error}") from error


def report(found: list[Output]) -> None:
    """Say where everything goes, absolute; warn about places that are emptied."""
    lines = [f"{output.what + ':':<13}{output.path}\n" for output in found]
    sys.stderr.write("".join(["this run writes\n", *(f"  {line}" for line in lines)]))
    for output in found:
        if ray_owns(output.path):
            log.warning(
                "%s %s lies in a folder of Ray's, which Ray empties: what is written there will be lost. Give an "
                "absolute path outside of it",
                output.flag,
                output.path,
            )
    sys.stderr.flush()


def ray_owns(path: Path) -> bool:
    """Whether Ray removes what lies there: its temporary folder, or the copy of a job's working directory."""
    real = Path(os.path.realpath(path))
    roots = [Path("/tmp/ray"), Path(tempfile.gettempdir()) / "ray"]
    if root := os.environ.get("RAY_TMPDIR"):
        roots.append(Path(root) / "ray")
    parts = real.parts
    session = any(part.startswith("session_") for part in parts) and "runtime_resources" in parts
    return session or any(real.is_relative_to(os.path.realpath(root)) for root in roots)


def model_bytes(model: str) -> int:
    """Size of a local model's weights, 0 where it is not known: the least that a run will write."""
    folder = Path(model).expanduser()
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if model and folder.is_dir() else 0


def _models(config: TrainPPOConfig | SupervisedRun) -> list[str]:
    """The models that a run reads; the trained one first."""
    if isinstance(config, TrainPPOConfig):
        found = [config.actor.model_name_or_path, config.critic.model_name_or_path, config.reward.model_name_or_path]
    else:
        found = [config.model.model_name_or_path]
        if isinstance(config, TrainDPOConfig):
            found.append(config.ref.model_name_or_path)
    return [path for path in found if path]


def _refuse_inputs(output: Output, models: list[str]) -> None:
    for model in models if output.model else ():
        folder = Path(model).expanduser()
        if folder.is_dir() and output.path.exists() and os.path.samefile(folder, output.path):
            raise ValueError(
                f"{output.flag} {str(output.path)!r} is the folder of a model that this run reads: the export would "
                "replace it. Give another folder"
            )
