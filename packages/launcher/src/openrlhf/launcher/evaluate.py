"""`openrlhf-launch eval [--json] -- <flags of train_ppo_ray>`: a model on the evaluation data, without training.

The seeds of the samples are those of a run with the same flags, so the same weights give the numbers that it logged.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from openrlhf.launcher import signals
from openrlhf.launcher.command_line import run_command
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import EvaluationConfig
from openrlhf.launcher.logging.values import finite
from openrlhf.launcher.parsing import wants_help
from openrlhf.launcher.run import until_end
from openrlhf.launcher.subcommand_parser import SubcommandParser, split_at_dashes

if TYPE_CHECKING:
    from openrlhf.launcher.samples import Group


def main(argv: Sequence[str]) -> int:
    """Evaluate and print the metrics; returns the exit status."""
    own, flags = split_at_dashes(argv)
    parser = SubcommandParser(
        "eval",
        "Sample the answers of --actor.model_name_or_path to --eval.dataset and reward them, as a training run with "
        "the same flags does. Flags of training change nothing.",
        "%(prog)s [options] -- <flags of train_ppo_ray>",
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    options = parser.parse_args(["--help"] if wants_help(flags) else own)

    def start(config: EvaluationConfig) -> int:
        return until_end(lambda: _evaluate(config, as_json=options.json))

    return run_command(TRAIN_PPO_RAY, flags, start, read_as=EvaluationConfig.of)


def _evaluate(config: EvaluationConfig, *, as_json: bool) -> None:
    from openrlhf.launcher.trainer.evaluation import evaluation_metrics  # after the first mistakes are told

    with redirect_stdout(sys.stderr):  # what libraries print is none of the answer
        groups = _sample(config)
    metrics = finite(evaluation_metrics(groups, config.eval.n_samples_per_prompt))
    failures = [text for group in groups for text in group.failures]
    if failures and metrics["eval/eval_failed_samples"] == metrics["eval/eval_num_samples"]:
        raise ValueError(f"every sample of the evaluation failed, the first one: {failures[0]}")
    if as_json:
        sys.stdout.write(json.dumps(metrics) + "\n")
        return
    width = max(map(len, metrics))
    sys.stdout.write("".join(f"{name:<{width}}  {value:.4g}\n" for name, value in metrics.items()))


def _sample(config: EvaluationConfig) -> list[Group]:
    from openrlhf.launcher.preflight import check, prepare
    from openrlhf.launcher.ray.cluster import connect, reserve
    from openrlhf.launcher.ray.setup_commands import check_setup_commands

    check_setup_commands(os.environ)
    checked = check(config)
    cluster = reserve()
    try:
        prepared = prepare(config, checked)
        cluster = connect(cluster)
        from openrlhf.launcher.ray.evaluation import sample_evaluation

        return asyncio.run(sample_evaluation(config, prepared, cluster))
    finally:
        signals.ignore()
        cluster.close()
