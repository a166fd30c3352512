"""`openrlhf-launch replay RECORD`: train the learner again on the batches of a run."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.launcher import signals
from openrlhf.launcher.command_line import USAGE_EXIT, prepare
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.machine import detect_machine
from openrlhf.launcher.parsing import UsageError
from openrlhf.launcher.redaction import report_error
from openrlhf.launcher.subcommand_parser import SubcommandParser, split_at_dashes

if TYPE_CHECKING:
    from openrlhf.launcher.ray.cluster import Cluster
    from openrlhf.launcher.record.reader import Record
    from openrlhf.launcher.trainer.loop import RunSummary

OWN: dict[str, Any] = {
    "ckpt.load_enable": False,
    "ckpt.save_steps": -1,
    "eval.steps": -1,
    "logger.tensorboard_dir": None,
    "logger.path": None,
    "logger.wandb.key": None,
}
"""What a replay does not take from the run, beside the folders that it writes."""
WITHOUT_ENGINES: dict[str, Any] = {
    "algo.dynamic_filtering_enable": False,
    "eval.dataset": None,
    "reward.model_name_or_path": None,
    "train.async_enable": False,
    "train.partial_rollout_enable": False,
    "vllm.num_engines": 0,
}
"""What would sample, filter or score: all that was done when the batches were recorded."""
STEPS = re.compile(r"(\d+)(?:-(\d+)?)?")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What is to be done. recorded: the run's own configuration with what the user changed; config: without engines."""

    record: Record
    steps: Sequence[int]
    recorded: TrainPPOConfig
    config: TrainPPOConfig


def main(argv: Sequence[str]) -> int:
    """Replay a record; returns the exit status."""
    own, flags = split_at_dashes(argv)
    parser = SubcommandParser(
        "replay",
        "Train on the recorded batches of a run, without engines. With the same flags the weights are the same.",
        "%(prog)s RECORD [--steps FIRST-LAST] [--output_dir FOLDER] [-- <flags of train_ppo_ray>]",
    )
    parser.add_argument("record", help="folder of the record, or of its run")
    parser.add_argument("--steps", help="which steps, as in 3 or 3-9 or 3- (default: all from the first)")
    parser.add_argument("--output_dir", default="./replay", help="folder of the model, logs and checkpoints")
    options = parser.parse_args(own)
    try:
        replay = read_replay(options.record, options.steps, Path(options.output_dir), flags)
    except UsageError as error:
        sys.stderr.write("\n".join(["replay:", *(f"  {problem}" for problem in error.problems)]) + "\n")
        return USAGE_EXIT
    except (ValueError, OSError) as error:
        return report_error(error)
    return run_replay(replay)


def read_replay(folder: str, steps: str | None, output: Path, flags: Sequence[str]) -> Replay:
    """The run's configuration with the user's flags, and which steps. Raises ValueError, UsageError for flags."""
    from openrlhf.launcher.outputs import absolute
    from openrlhf.launcher.record.reader import Record
    from openrlhf.launcher.replay.batches import steps_of

    record = Record.open(folder)
    first, last = _span(steps)
    words = [f"--ckpt.output_dir={output / 'model'}", f"--ckpt.path={output / 'checkpoints'}"]
    known = _without_own(record.config.read_text(encoding="utf-8"), output)
    asked, _ = prepare(TRAIN_PPO_RAY, ["--config", str(known), *words, *flags], replace(detect_machine(), nodes=1))
    recorded = absolute(asked)
    if recorded.ckpt.load_enable and first is None:
        first = record.complete_steps()[0] if record.complete_steps() else None
    return Replay(
        record=record,
        steps=steps_of(record, first, last),
        recorded=recorded,
        config=build(recorded, WITHOUT_ENGINES),
    )


def _span(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    match = STEPS.fullmatch(text)
    if match is None:
        raise ValueError(f"--steps {text!r}: give a step or a span of steps, as in 3 or 3-9 or 3-")
    first = int(match[1])
    return first, int(match[2]) if match[2] else (None if text.endswith("-") else first)


def _without_own(toml: str, output: Path) -> Path:
    """The run's configuration as a file of the replay's, with the defaults in the place of `OWN`."""
    lines, table = [], ""
    for line in toml.splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        if f"{table}.{line.partition(' = ')[0]}" not in OWN:
            lines.append(line)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "recorded.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_replay(replay: Replay) -> int:
    """Start the learner's ranks and train. Returns the exit status."""
    from openrlhf.launcher.run import until_end

    return until_end(lambda: _run(replay))


def _run(replay: Replay) -> None:
    from openrlhf.launcher.outputs import hold_outputs
    from openrlhf.launcher.ray.cluster import connect, reserve

    with hold_outputs(TRAIN_PPO_RAY, replay.config):
        cluster = reserve()
        try:
            cluster = connect(cluster)
            summary = asyncio.run(_train(replay, cluster))
        finally:
            signals.ignore()
            cluster.close()
    first, last = replay.steps[0], replay.steps[-1]
    sys.stdout.write(
        f"replayed the steps {first} to {last}: {summary.optimizer_steps} optimiser steps\n"
        f"  model: {replay.config.ckpt.output_dir}\n"
    )


async def _train(replay: Replay, cluster: Cluster) -> RunSummary:
    from openrlhf.launcher.logging.logger import RunLogger
    from openrlhf.launcher.preflight import prepare_models
    from openrlhf.launcher.ray.replay import start_replay_learner, store
    from openrlhf.launcher.record.run_record import open_record
    from openrlhf.launcher.replay.batches import NoPrompts, RecordedBatches, RecordedRollout, as_before
    from openrlhf.launcher.saved import config_toml
    from openrlhf.launcher.trainer.loop import Trainer, TrainerParts

    config, record = replay.config, replay.record
    prepared = prepare_models(config, prompts=record.about["prompts"])
    logger = RunLogger(config, steps=replay.steps[-1])
    try:
        toml = config_toml(TRAIN_PPO_RAY, replay.recorded)
        about: dict[str, Any] = {"run": logger.run_id, "toml": toml, "prompts": record.about["prompts"]}
        own = open_record(config, prepared.tokenizer, **about)
        learner = await start_replay_learner(config, replay.recorded, prepared, cluster)
        rollout, prompts = RecordedRollout(store), NoPrompts()
        batches = RecordedBatches(config, rollout, prompts, record=record, steps=replay.steps)
        parts = TrainerParts(
            rollout=rollout,
            learner=learner,
            prompts=prompts,
            sink=logger,
            config_toml=toml,
            sources=prepared.plugins.sources(),
            record=own,
            pipeline=batches,
        )
        trainer = Trainer(config, parts)
        as_before(trainer, record.steps()[replay.steps[0]].before)
        try:
            return await trainer.run()
        finally:
            await learner.shutdown()
    finally:
        logger.close()
