"""What the environment hands to sbatch: nothing of a job that we are in, and what no script may hold."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from openrlhf.launcher.redaction import find_secrets
from openrlhf.launcher.secret_flags import as_variable, split_secret_flags
from openrlhf.launcher.slurm.sbatch_arguments import OptionError, sbatch_arguments

OF_A_JOB = ("SLURM_", "SBATCH_", "SRUN_", "SLURMD_")
OF_THE_SITE = frozenset({"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"})
IN_A_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
OF_A_STEP = ("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SRUN_CPUS_PER_TASK", "SRUN_DEBUG")


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as it would be outside of the job that we are in.

    sbatch and srun read most options from such variables too: the masks and amounts of memory of the surrounding job
    would be asked of the new one, where they contradict its own.
    """
    if not any(name in environ for name in IN_A_JOB):
        return dict(environ)
    return {k: v for k, v in environ.items() if k in OF_THE_SITE or not k.startswith(OF_A_JOB)}


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a job, without what binds the processes of a step that we are in."""
    return {k: v for k, v in environ.items() if not k.startswith(OF_A_STEP)}


def variables(options: argparse.Namespace) -> dict[str, str]:
    """The variables of --env."""
    return {name: value for name, _, value in (item.partition("=") for item in options.env)}


def is_secret(name: str, value: str) -> bool:
    """Whether a variable may not stand in a script."""
    return any(find_secrets(name, value))


def secret_variables(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, str]:
    """What goes to the job by its environment alone: secret variables of --env, and secret flags.

    Raises OptionError where sbatch is told not to hand the environment on.
    """
    found = {k: v for k, v in variables(options).items() if is_secret(k, v)} | as_variable(split_secret_flags(flags)[1])
    export = sbatch_arguments(options.sbatch_arg).get("export", "ALL")
    if found and "ALL" not in str(export).upper().split(","):
        names = ", ".join(sorted(found))
        raise OptionError(f"--sbatch-arg --export={export}: {names} must reach the job by its environment: add ALL")
    return found


@contextmanager
def submission(added: Mapping[str, str]) -> Iterator[None]:
    """While it is open, this process has the environment that the job shall have."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(without_job(before) | dict(added))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
