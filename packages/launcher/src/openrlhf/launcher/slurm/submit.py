"""`openrlhf-launch slurm [options] -- <flags of train_ppo_ray>`: submit a run, or run inside an allocation."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from openrlhf.launcher.command_line import USAGE_EXIT, finish, usage_message
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.machine import Machine
from openrlhf.launcher.parsing import UsageError, parse
from openrlhf.launcher.redaction import redact, secrets_of_words
from openrlhf.launcher.secret_flags import split_secret_flags
from openrlhf.launcher.slurm.environment import secret_variables, submission
from openrlhf.launcher.slurm.names import count_gpus, gpus_of_gres
from openrlhf.launcher.slurm.options import add_slurm_options, read_options
from openrlhf.launcher.slurm.runner import NodeSpec
from openrlhf.launcher.slurm.sbatch_arguments import OptionError
from openrlhf.launcher.slurm.states import JobState, wait_for
from openrlhf.launcher.subcommand_parser import SubcommandParser, split_at_dashes

if TYPE_CHECKING:
    from openrlhf.launcher.slurm.script import Executor

T = TypeVar("T")

MISSING = "this needs submitit: pip install 'openrlhf-launcher[slurm]'"
RESUME = "--ckpt.load_enable"


def main(argv: Sequence[str]) -> int:
    """Submit, or print, or run; returns the exit status."""
    own, flags = split_at_dashes(argv)
    try:
        options = read_options(_parser(), own)
        part = make_check(options, flags) if options.selfcheck else make_spec(options, flags)
        secrets = secret_variables(options, () if options.selfcheck else flags)
        if options.in_allocation:
            from openrlhf.launcher.slurm.in_allocation import run_in_allocation

            return run_in_allocation(options, part.node_command(), secrets)
        require_submitit()
        with submission(secrets):
            return _submit(options, part, secrets)
    except UsageError as error:
        sys.stderr.write(usage_message(TRAIN_PPO_RAY, error) + "\n")
    except OptionError as error:
        sys.stderr.write(redact(f"openrlhf-launch slurm: {error}\n", secrets_of_words(own)))
    return USAGE_EXIT


def require_submitit() -> None:
    """Raises OptionError with the command to install it."""
    if importlib.util.find_spec("submitit") is None:
        raise OptionError(MISSING)


def make_spec(options: argparse.Namespace, flags: Sequence[str]) -> NodeSpec:
    """The run of each node; UsageError lists the mistakes in the trainer's flags.

    Where the options say how many GPUs a node has, the rules between flags are checked too, before the job waits.
    """
    config = parse(TRAIN_PPO_RAY, flags).config
    if gpus := count_gpus(options.gpus_per_node) if options.gpus_per_node else gpus_of_gres(options.gres or ""):
        finish(TRAIN_PPO_RAY, config, Machine(gpus=gpus, nodes=options.nodes))
    return NodeSpec(
        command=(python_of(options), "-m", "openrlhf.cli.train_ppo_ray", *split_secret_flags(flags)[0]),
        resume=() if config.ckpt.load_enable else (RESUME,),
        checkpoints=str(Path(config.ckpt.path).expanduser().absolute()),
        max_restarts=options.max_restarts,
        port_base=options.port_base,
        temp_dir=options.temp_dir,
        start_seconds=options.start_timeout,
    )


@dataclass(frozen=True)
class NodeCheck:
    """`openrlhf-launch selfcheck` with these words on every node of a job, which is ended with its status."""

    python: str
    words: tuple[str, ...]

    def __call__(self) -> int:
        """Check this node."""
        from openrlhf.launcher.selfcheck.command import main as check

        code = check(self.words)
        if code:
            sys.exit(code)
        return code

    def node_command(self) -> list[str]:
        """The same as a command."""
        return [self.python, "-m", "openrlhf.launcher.main", "selfcheck", *self.words]


def make_check(options: argparse.Namespace, words: Sequence[str]) -> NodeCheck:
    """The check of each node, in a job that is never requeued. Raises OptionError for words that it does not know."""
    from openrlhf.launcher.selfcheck.command import read_options as read_check

    try:
        read_check(words)
    except ValueError as error:
        raise OptionError(f"--selfcheck: {error}") from None
    options.max_restarts = 0
    return NodeCheck(python_of(options), tuple(words))


def python_of(options: argparse.Namespace) -> str:
    """The interpreter on the nodes."""
    return options.python or ("python3" if options.container_image else sys.executable)


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
        "Run training on a Slurm cluster: Ray on every node, the trainer on the first.",
        "%(prog)s [options] -- <flags of train_ppo_ray>",
    )
    add_slurm_options(parser)
    add_submission_options(parser)
    parser.add_argument(
        "--selfcheck", action="store_true", help="run `openrlhf-launch selfcheck` on every node; its options follow --"
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
