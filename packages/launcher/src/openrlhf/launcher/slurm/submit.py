"""`openrlhf-launch slurm [options] -- [what to run] <its flags>`: submit a run, or run inside an allocation."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from openrlhf.launcher.command_line import USAGE_EXIT, usage_message
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.parsing import UsageError
from openrlhf.launcher.redaction import redact, secrets_of_words
from openrlhf.launcher.slurm.environment import secret_variables, submission
from openrlhf.launcher.slurm.options import add_slurm_options, read_options
from openrlhf.launcher.slurm.runs import make_part, read_run
from openrlhf.launcher.slurm.sbatch_arguments import OptionError
from openrlhf.launcher.slurm.spec import NodeCheck, NodeSpec
from openrlhf.launcher.slurm.states import JobState, wait_for
from openrlhf.launcher.subcommand_parser import SubcommandParser, split_at_dashes

if TYPE_CHECKING:
    from openrlhf.launcher.slurm.script import Executor

T = TypeVar("T")

MISSING = "this needs submitit: pip install 'openrlhf-launcher[slurm]'"


def main(argv: Sequence[str]) -> int:
    """Submit, or print, or run; returns the exit status."""
    own, words = split_at_dashes(argv)
    command = TRAIN_PPO_RAY
    try:
        options = read_options(_parser(), own)
        run = read_run(words)
        command = run.command
        part = make_part(options, run)
        secrets = secret_variables(options, run.flags)
        if options.in_allocation:
            from openrlhf.launcher.slurm.in_allocation import run_in_allocation

            return run_in_allocation(options, part.node_command(), secrets)
        require_submitit()
        with submission(secrets):
            return _submit(options, part, secrets)
    except UsageError as error:
        sys.stderr.write(usage_message(command, error) + "\n")
    except OptionError as error:
        sys.stderr.write(redact(f"openrlhf-launch slurm: {error}\n", secrets_of_words(argv)))
    return USAGE_EXIT


def require_submitit() -> None:
    """Raises OptionError with the command to install it."""
    if importlib.util.find_spec("submitit") is None:
        raise OptionError(MISSING)


def tell_secrets(names: Iterable[str]) -> None:
    """Say which variables a printed script needs and does not hold."""
    if names := sorted(names):
        sys.stderr.write(f"note: {', '.join(names)} reach the job by the environment of the submission\n")


def _submit(options: argparse.Namespace, part: NodeSpec | NodeCheck, secrets: Iterable[str]) -> int:
    from openrlhf.launcher.slurm.job import Job
    from openrlhf.launcher.slurm.script import make_executor

    executor = make_executor(options)
    if options.dry_run:
        sys.stdout.write(executor.script() + "\n")
        tell_secrets(secrets)
        return 0
    if options.test_only:
        return ask_slurm(executor)
    job = Job(part) if isinstance(part, NodeSpec) else part
    job_id = hand_over(lambda: executor.submit(job).job_id)
    report(options, [job_id], job_id)
    return follow(job_id) if options.wait else 0


def hand_over(submit: Callable[[], T]) -> T:
    """Call `submit`; OptionError says what Slurm had against it."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        return submit()
    except (FailedJobError, FailedSubmissionError) as error:
        raise OptionError(f"Slurm did not take the job: {error}") from None
    except FileNotFoundError as error:
        raise OptionError(f"there is no {error.filename!r} here: run this on a login node of a Slurm cluster") from None


def ask_slurm(executor: Executor) -> int:
    """`sbatch --test-only` on the script; its exit status."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(executor.script())
        file.flush()
        try:
            return subprocess.run(["sbatch", "--test-only", file.name], check=False, timeout=60).returncode
        except FileNotFoundError:
            raise OptionError("there is no 'sbatch' here: run this on a login node of a Slurm cluster") from None


def report(options: argparse.Namespace, job_ids: Sequence[str], first: str) -> None:
    """Say what was submitted: the ids alone with --parsable."""
    if options.parsable:
        sys.stdout.write("\n".join(job_ids) + "\n")
    else:
        logs = Path(options.log_dir).absolute()
        sys.stdout.write(f"submitted {', '.join(job_ids)}\n  logs: {logs}\n")
        sys.stdout.write(f"  follow: openrlhf-launch logs -f {first} --log-dir {options.log_dir}\n")
    sys.stdout.flush()


def follow(job_id: str) -> int:
    """Wait for a job; its exit status, the highest one of an array."""

    def tell(state: JobState) -> None:
        sys.stderr.write(f"{state.job_id} {state.state}{f' ({state.reason})' if state.reason else ''}\n")

    return max(state.status for state in wait_for(job_id, tell=tell))


def _parser() -> argparse.ArgumentParser:
    parser = SubcommandParser(
        "slurm",
        "Run training, an evaluation, a reward server or the self-check on a Slurm cluster. After the two dashes comes "
        "RL training, or train_sft, train_rm, train_dpo, eval, serve_rm, selfcheck or join before words of their own. "
        "RL and evaluations have Ray on every node, supervised training has a rank per GPU.",
        "%(prog)s [options] -- [train_ppo_ray | train_sft | ...] <flags>",
    )
    add_slurm_options(parser)
    add_submission_options(parser)
    parser.add_argument(
        "--het",
        action="append",
        default=[],
        metavar="PARTS=OPTIONS",
        help="nodes of another kind for some parts of an RL run (engines, judge, critic, ref, reward, agents), as "
        "--het engines='--nodes 2 --gpus-per-node 4 --partition a100' (may be repeated)",
    )
    parser.add_argument(
        "--in-allocation", action="store_true", help="run here and now, inside a job that has its nodes already"
    )
    return parser


def add_submission_options(parser: argparse.ArgumentParser) -> None:
    """What to do with the batch script."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    what.add_argument("--test-only", action="store_true", help="ask Slurm whether it would take the job")
    what.add_argument("--wait", action="store_true", help="wait for the end; exit with the job's status")
    parser.add_argument("--parsable", action="store_true", help="print the job id alone")
