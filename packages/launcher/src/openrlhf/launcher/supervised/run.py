"""`train_supervised`: the main of a supervised rank, before anything heavy is imported."""

from __future__ import annotations

import logging
import os
import sys

from openrlhf.launcher import signals
from openrlhf.launcher.outputs import absolute
from openrlhf.launcher.redaction import configure_logging, report_error
from openrlhf.launcher.supervised.process import complete_environment, is_first
from openrlhf.launcher.supervised_config import SupervisedRun, TrainRMConfig, TrainSFTConfig


def train_supervised(config: SupervisedRun) -> int:
    """Train. Returns the exit code: 0, 1 with one clear message for a user's mistake, 85 if it was warned and saved."""
    complete_environment(os.environ, local_rank=config.local_rank)
    level = logging.INFO if is_first() else logging.ERROR
    configure_logging(level, quiet=("httpx", "filelock", "datasets"))
    signals.install()
    warned = signals.Warned()
    config = absolute(config)
    try:
        check_at_first(config)
    except (OSError, ValueError) as error:
        return report_error(error)
    from openrlhf.learner.setup import prepare_environment, training_device

    prepare_environment(os.environ, training_device().type)  # before anything imports DeepSpeed
    from openrlhf.launcher.supervised.session import run_session

    try:
        progress = run_session(config, warned)
    except signals.StoppedAfterSave as stop:
        return signals.saved(stop)
    except Exception as error:
        return report_error(error)
    if is_first():
        sys.stdout.write(f"done: {progress.step} optimiser steps\n  model: {config.ckpt.output_dir}\n")
        sys.stdout.flush()
    return 0


def check_at_first(config: SupervisedRun) -> None:
    """Paths and field names, before torch is loaded; everything else is checked once the tokenizer is there."""
    from openrlhf.launcher.data.early import check_at_sight
    from openrlhf.launcher.data.readers import pair_fields, sft_fields
    from openrlhf.launcher.preflight import check_model

    check_model(config.model.model_name_or_path, "--model.model_name_or_path")
    if isinstance(config, TrainSFTConfig):
        fields = sft_fields(config.data.input_key, config.data.output_key)
    else:
        data, margins = config.data, isinstance(config, TrainRMConfig) and config.model.margin_loss_enable
        fields = pair_fields(data.prompt_key, data.chosen_key, data.rejected_key, margins=margins)
    if not isinstance(config, TrainRMConfig) and config.ref.model_name_or_path:
        check_model(config.ref.model_name_or_path, "--ref.model_name_or_path")
    check_at_sight(config.data.dataset, fields, split=config.data.dataset_split, flag="--data.dataset")
    if config.eval.dataset is not None:
        check_at_sight(config.eval.dataset, fields, split=config.eval.split, flag="--eval.dataset")
