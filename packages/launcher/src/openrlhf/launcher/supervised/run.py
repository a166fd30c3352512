"""`train_supervised`: the main of a supervised rank, before anything heavy is imported."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from openrlhf.launcher import signals
from openrlhf.launcher.errors import report_error
from openrlhf.launcher.redaction import configure_logging
from openrlhf.launcher.supervised.process import complete_environment, is_first
from openrlhf.launcher.supervised_config import SupervisedRun


def train_supervised(config: SupervisedRun) -> int:
    """Train. Returns the exit code: 0, 1 with one clear message for a user's mistake, 85 if it was warned and saved."""
    complete_environment(os.environ, local_rank=config.local_rank)
    level = logging.INFO if is_first() else logging.ERROR
    configure_logging(level, quiet=("httpx", "filelock", "datasets"))
    signals.install()
    warned = signals.Warned()
    from openrlhf.learner.setup import prepare_environment, training_device

    prepare_environment(os.environ, training_device().type)  # DeepSpeed reads it when it is imported
    from openrlhf.launcher.supervised.session import run_session

    try:
        progress = run_session(config, warned)
    except signals.StoppedAfterSave as stop:
        return signals.saved(stop)
    except Exception as error:
        return report_error(error)
    if is_first():
        where = Path(config.ckpt.output_dir).resolve()
        sys.stdout.write(f"done: {progress.step} optimiser steps\n  model: {where}\n")
        sys.stdout.flush()
    return 0
