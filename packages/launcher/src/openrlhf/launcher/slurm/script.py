"""The batch script of a run, written by submitit: resources, environment, one node runner per node, requeue."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from openrlhf.launcher.slurm.environment import is_secret, variables
from openrlhf.launcher.slurm.names import minutes
from openrlhf.launcher.slurm.node import TOKEN
from openrlhf.launcher.slurm.options import PASSED_ON
from openrlhf.launcher.slurm.requeue import REQUEUE_EXIT
from openrlhf.launcher.slurm.sbatch_arguments import sbatch_arguments

SECRET = f"""{TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {TOKEN}"""
REQUEUE = f"""code=$?
if [ "$code" -eq {REQUEUE_EXIT} ]; then
  echo "requeue of job $SLURM_JOB_ID" >&2
  scontrol requeue "$SLURM_JOB_ID" && sleep 120
fi
exit "$code\""""
"""After srun: outside of any container, where `scontrol` is. The step's status stays the job's."""


class Executor(SlurmExecutor):
    """submitit's executor; a script can also be made on a machine without Slurm."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self) -> str:
        """The text that `submit` hands to sbatch."""
        return self._make_submission_file_text(self._submitit_command_str, "")


def make_executor(options: argparse.Namespace) -> Executor:
    """An executor that submits as `options` say."""
    folder = Path(options.log_dir).absolute() / "%j"
    executor = Executor(folder, max_num_timeout=options.max_restarts, python=python_command(options))
    executor.update_parameters(
        job_name=options.job_name,
        nodes=options.nodes,
        ntasks_per_node=1,
        time=minutes(options.time),
        cpus_per_task=options.cpus_per_task,
        exclusive=True if options.exclusive else None,
        signal_delay_s=options.signal_delay,
        stderr_to_stdout=True,
        setup=setup_lines(options),
        teardown=REQUEUE.splitlines(),
        srun_args=srun_arguments(options),
        additional_parameters=further_parameters(options),
    )
    return executor


def submit_array(executor: Executor, functions: Sequence[Callable[[], int]]) -> list[Any]:
    """Submit one job per function, as an array where there are several; returns submitit's jobs."""
    with executor.batch():
        return [executor.submit(function) for function in functions]


def further_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """What submitit has no parameter for, or would pass on in another form; `True` is a bare flag."""
    given = {name: getattr(options, name.replace("-", "_")) for name in PASSED_ON}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    values["wckey"] = ""  # submitit's own key is refused by sites that check them
    values["requeue" if options.max_restarts > 0 else "no-requeue"] = True
    return values | sbatch_arguments(options.sbatch_arg)


def setup_lines(options: argparse.Namespace) -> list[str]:
    """Shell lines before srun. A failing line ends the job. Secret variables come with the job's environment."""
    shown = {name: value for name, value in variables(options).items() if not is_secret(name, value)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in shown.items()]
    return ["set -e", "export SLURM_EXPORT_ENV=ALL", *options.setup, *exports, *SECRET.splitlines(), "set +e"]


def srun_arguments(options: argparse.Namespace) -> list[str]:
    """One task per node; an end of one does not kill the others: the node runners end each other in order."""
    words = [f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--kill-on-bad-exit=0", "--wait=0"]
    if options.cpus_per_task:
        words.append(f"--cpus-per-task={options.cpus_per_task}")
    if runtime(options) == "pyxis":
        words.append(f"--container-image={options.container_image}")
        if options.container_mount:
            words.append(f"--container-mounts={','.join(options.container_mount)}")
    return [*words, *options.srun_arg]


def runtime(options: argparse.Namespace) -> str:
    """Which container runtime the run uses; `none` without an image."""
    return (options.container_runtime or "pyxis") if options.container_image else "none"


def python_command(options: argparse.Namespace) -> str:
    """The interpreter of the node runners, as shell words."""
    if runtime(options) == "none":
        return shlex.quote(options.python or sys.executable)
    python = options.python or "python3"
    if runtime(options) == "pyxis":
        return shlex.quote(python)
    binds = [word for mount in options.container_mount for word in ("--bind", mount)]
    return shlex.join(["apptainer", "exec", "--nv", *binds, options.container_image, python])
