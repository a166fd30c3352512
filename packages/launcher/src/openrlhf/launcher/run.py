"""`train_ppo`: from a parsed configuration to a finished run. The only place where all parts meet."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.launcher import signals
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.record.place import record_folder
from openrlhf.launcher.redaction import configure_logging, report_error

if TYPE_CHECKING:
    from openrlhf.launcher.preflight import Prepared
    from openrlhf.launcher.ray.cluster import Cluster
    from openrlhf.launcher.trainer.loop import RunSummary


def train_ppo(config: TrainPPOConfig) -> int:
    """Run RL training. Returns the process' exit code: 0, or 1 with one clear message for a user's mistake."""
    from openrlhf.launcher.outputs import absolute

    config = absolute(config)
    return until_end(lambda: print_summary(config, _run(config)))


def until_end(work: Callable[[], None]) -> int:
    """Do the work of a process that starts others; signals end it, and errors are told. Returns its exit code."""
    configure_logging(logging.INFO, quiet=("httpx", "ray", "filelock", "datasets"))
    signals.install()
    try:
        work()
    except signals.StoppedAfterSave as stop:
        return signals.saved(stop)
    except (Exception, SystemExit) as error:
        if (signum := signals.received()) is not None:
            return 128 + signum
        if isinstance(error, SystemExit):
            raise
        return report_error(error)
    finally:
        signals.ignore()
    return 0


def _run(config: TrainPPOConfig) -> RunSummary:
    from openrlhf.launcher.outputs import hold_outputs, try_export_settings
    from openrlhf.launcher.preflight import check, prepare
    from openrlhf.launcher.ray.cluster import connect, reserve
    from openrlhf.launcher.ray.setup_commands import check_setup_commands

    check_setup_commands(os.environ)
    with hold_outputs(TRAIN_PPO_RAY, config):
        checked = check(config)
        cluster = reserve()  # what workers import is loaded beside what the driver does
        try:
            prepared = prepare(config, checked)
            try_export_settings(config.ckpt.output_dir, prepared.model_path, prepared.tokenizer)
            cluster = connect(cluster)
            return asyncio.run(_train(config, prepared, cluster))
        except signals.StoppedAfterSave:
            raise
        except Exception as error:
            if ended := cluster.ended():
                raise RuntimeError(f"the run's own Ray ended: {ended}; then: {error}") from error
            raise
        finally:
            signals.ignore()
            cluster.close()


async def _train(config: TrainPPOConfig, prepared: Prepared, cluster: Cluster) -> RunSummary:
    from openrlhf.launcher.horizon import rollout_step_horizon
    from openrlhf.launcher.logging.logger import RunLogger
    from openrlhf.launcher.ray.calls import unless
    from openrlhf.launcher.ray.rollout import RayRollout
    from openrlhf.launcher.ray.start import start_parts
    from openrlhf.launcher.record.run_record import open_record
    from openrlhf.launcher.saved import config_toml
    from openrlhf.launcher.tracing import start_tracing, trace_target
    from openrlhf.launcher.trainer.loop import Trainer

    logger = RunLogger(config, steps=rollout_step_horizon(config.rollout, config.train, len(prepared.prompts)))
    stop_tracing = start_tracing(trace_target(config), "trainer")
    try:
        toml, count = config_toml(TRAIN_PPO_RAY, config), len(prepared.prompts)
        record = open_record(config, prepared.tokenizer, run=logger.run_id, toml=toml, prompts=count)
        parts = replace(await start_parts(config, prepared, cluster, logger), record=record)
        trainer = Trainer(config, parts)
        signals.on_warning(trainer.stop_after_step)
        assert isinstance(parts.rollout, RayRollout)
        try:
            return await unless(parts.rollout.failure(), trainer.run())
        finally:
            await parts.rollout.shutdown()
            await parts.learner.shutdown()
    finally:
        stop_tracing()
        logger.close()


def print_summary(config: TrainPPOConfig, summary: RunSummary) -> None:
    """The last lines of a run: what was done and where it lies."""
    lines = [f"done: {summary.steps} steps, {summary.optimizer_steps} optimiser steps"]
    lines += [f"  {key} {value:.4g}" for key, value in sorted(summary.evaluation.items()) if "pass" in key]
    places = written(config)
    lines += [f"  {sentence}" for sentence in how_it_went(places)]
    lines.append(f"  model: {config.ckpt.output_dir}")
    if (record := record_folder(config)) is not None:
        lines.append(f"  record: {record}")
    if config.logger.tensorboard_dir:
        lines.append(f"  TensorBoard: tensorboard --logdir {config.logger.tensorboard_dir}")
    if places:
        lines.append(f"  report: openrlhf-launch report {shlex.quote(str(places[0]))}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def written(config: TrainPPOConfig) -> list[Path]:
    """The folders in which a report finds the run."""
    logger = config.logger
    logs = None if logger.tensorboard_dir is None else Path(logger.tensorboard_dir) / logger.wandb.run_name
    return [folder for folder in (logs, record_folder(config)) if folder is not None]


def how_it_went(places: Sequence[Path]) -> list[str]:
    """The run in words, from the first of its folders that can be read."""
    from openrlhf.launcher.report.run_files import read_run
    from openrlhf.launcher.report.words import in_words

    for place in places:
        try:
            run = read_run(place)
        except (OSError, ValueError):  # a disk that was full is no reason to fail at the end
            continue
        return in_words(run.steps, run.evaluations, run.alarms)
    return []
