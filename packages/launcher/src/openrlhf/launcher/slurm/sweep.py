"""`openrlhf-launch sweep --set FLAG=A,B ... -- [trainer] <flags>`: one run per combination, as a job array."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from openrlhf.launcher.command_line import USAGE_EXIT, usage_message
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.parsing import UsageError
from openrlhf.launcher.redaction import find_secrets, redact, secrets_of_words
from openrlhf.launcher.slurm.environment import secret_variables, submission
from openrlhf.launcher.slurm.options import add_slurm_options, read_options
from openrlhf.launcher.slurm.runs import Run, make_spec, read_run
from openrlhf.launcher.slurm.sbatch_arguments import OptionError
from openrlhf.launcher.slurm.submit import (
    add_submission_options,
    ask_slurm,
    follow,
    hand_over,
    report,
    require_submitit,
)
from openrlhf.launcher.subcommand_parser import SubcommandParser, split_at_dashes
from openrlhf.learner.folders.files import replace_file

TABLE = "sweep.json"
"""In --sweep-dir: the values of each run, by its folder."""


def main(argv: Sequence[str]) -> int:
    """Submit the sweep; returns the exit status."""
    own, words = split_at_dashes(argv)
    command = TRAIN_PPO_RAY
    try:
        options = read_options(_parser(), own)
        run = read_run(words)
        command = run.command
        if not run.trains:
            raise OptionError(f"-- {run.name}: only training is swept")
        require_submitit()
        with submission(secret_variables(options, run.flags)):
            return _submit(options, run)
    except UsageError as error:
        sys.stderr.write(usage_message(command, error) + "\n")
    except OptionError as error:
        sys.stderr.write(redact(f"openrlhf-launch sweep: {error}\n", secrets_of_words(argv)))
    return USAGE_EXIT


def combinations(settings: Sequence[str]) -> list[dict[str, str]]:
    """`a=1,2` and `b=x` -> [{a: 1, b: x}, {a: 2, b: x}]. Values that hold commas come as JSON: `a=["1,2","3"]`."""
    axes: list[list[tuple[str, str]]] = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name or not text:
            raise OptionError(f"--set {setting!r} is no FLAG=VALUE,VALUE,...")
        if any(find_secrets(name, text)):
            raise OptionError(f"--set {name}: secrets are not swept; give the flag after the two dashes")
        values = json.loads(text) if text.startswith("[") else text.split(",")
        axes.append([(name.removeprefix("--"), str(value)) for value in values])
    return [dict(choice) for choice in itertools.product(*axes)]


def run_flags(flags: Sequence[str], values: dict[str, str], folder: Path) -> list[str]:
    """The command line of one run: its values, its own folders and the name of its logs come last and win."""
    own = {
        "ckpt.output_dir": str(folder),
        "ckpt.path": str(folder / "checkpoints"),
        "logger.wandb.run_name": f"{folder.parent.name}_{folder.name}",
    }
    return [*flags, *(word for name, value in (own | values).items() for word in (f"--{name}", value))]


def write_table(root: Path, table: str) -> None:
    """Say which run has which values; the table of another sweep stays, and so do its runs' folders."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / TABLE
    if path.exists() and path.read_text(encoding="utf-8") != table:
        raise OptionError(f"--sweep-dir {str(root)!r} holds another sweep ({TABLE}): give another folder")
    replace_file(path, table)


def _submit(options: argparse.Namespace, run: Run) -> int:
    from openrlhf.launcher.slurm.job import Job
    from openrlhf.launcher.slurm.script import make_executor, submit_array

    root = Path(options.sweep_dir).absolute()
    runs = {f"run{i:03d}": values for i, values in enumerate(combinations(options.set))}
    lines = [run_flags(run.flags, values, root / name) for name, values in runs.items()]
    specs = [make_spec(options, replace(run, flags=tuple(flags))) for flags in lines]
    executor = make_executor(options)
    executor.update_parameters(array_parallelism=options.array_parallelism)
    if options.dry_run or options.test_only:
        executor.parameters["map_count"] = len(specs)
        if options.test_only:
            return ask_slurm(executor)
        sys.stdout.write(executor.script() + "\n")
        return 0
    write_table(root, json.dumps(runs, indent=1) + "\n")
    jobs = hand_over(lambda: submit_array(executor, [Job(spec) for spec in specs]))
    ids = [job.job_id for job in jobs]
    report(options, ids, ids[0])
    return follow(ids[0].split("_")[0]) if options.wait else 0


def _parser() -> argparse.ArgumentParser:
    parser = SubcommandParser(
        "sweep",
        "Run every combination of some flags' values, each in a folder of its own.",
        "%(prog)s --set FLAG=VALUE,VALUE [options] -- [train_ppo_ray | train_sft | train_rm | train_dpo] <flags>",
    )
    parser.add_argument("--set", action="append", required=True, metavar="FLAG=A,B", help="values of a flag (repeat)")
    parser.add_argument("--sweep-dir", default="sweep", help="parent of the runs' folders")
    parser.add_argument("--array-parallelism", type=int, default=256, help="runs at the same time")
    add_slurm_options(parser)
    add_submission_options(parser)
    return parser
