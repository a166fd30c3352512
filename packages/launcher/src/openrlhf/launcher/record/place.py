"""Where a run's record lies and how large it may become. No library is loaded here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openrlhf.launcher.config import TrainPPOConfig

AUTO, NONE = "auto", "none"
FOLDER = "record"


@dataclass(frozen=True, kw_only=True)
class RecordPlace:
    """What a learner rank has to know. max_bytes: of the files of one rank."""

    folder: Path
    max_bytes: int


def record_folder(config: TrainPPOConfig) -> Path | None:
    """The folder of this run's record; None where nothing is recorded."""
    logger = config.logger
    if logger.record_dir == NONE:
        return None
    if logger.record_dir != AUTO:
        return Path(logger.record_dir).expanduser() / logger.wandb.run_name
    if logger.tensorboard_dir is not None:
        return Path(logger.tensorboard_dir).expanduser() / logger.wandb.run_name / FOLDER
    return Path(config.ckpt.path).expanduser() / FOLDER / logger.wandb.run_name


def writing_ranks(config: TrainPPOConfig) -> int:
    """How many of the policy's ranks write samples: one of those that work on the same samples."""
    return config.actor.world_size // config.ds.ranks_per_sample


def record_place(config: TrainPPOConfig) -> RecordPlace | None:
    """What each of them is told."""
    folder = record_folder(config)
    if folder is None:
        return None
    room = int(config.logger.record_max_gib * 2**30 / writing_ranks(config))
    return RecordPlace(folder=folder, max_bytes=room)
