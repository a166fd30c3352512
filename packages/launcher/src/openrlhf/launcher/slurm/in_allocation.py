"""`openrlhf-launch slurm --in-allocation`: the run inside a job that someone else's batch script asked for."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from openrlhf.launcher.slurm.environment import variables, without_step
from openrlhf.launcher.slurm.names import expand_nodes
from openrlhf.launcher.slurm.node import TOKEN
from openrlhf.launcher.slurm.requeue import REQUEUE_EXIT
from openrlhf.launcher.slurm.sbatch_arguments import OptionError
from openrlhf.launcher.slurm.script import container_words, srun_arguments

REQUEUE_SECONDS = 120
"""Slurm ends this process within that time once the job is requeued."""


def run_in_allocation(options: argparse.Namespace, node: Sequence[str], secret: Mapping[str, str]) -> int:
    """Start `node` on every node, hand signals on to it, requeue the job if it asks for it. Returns the exit status.

    secret: variables of the run that stand on no command line.
    """
    command = step_command(options, node, os.environ)
    own = {TOKEN: secrets.token_hex(32), "SLURM_EXPORT_ENV": "ALL"}
    step = subprocess.Popen(command, env=without_step(os.environ) | variables(options) | dict(secret) | own)

    def hand_on(signum: int, frame: FrameType | None) -> None:
        del frame
        step.send_signal(signum)

    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, hand_on)
    code = step.wait()
    if code == REQUEUE_EXIT:
        job = os.environ["SLURM_JOB_ID"]
        sys.stderr.write(f"requeue of job {job}\n")
        if subprocess.run(["scontrol", "requeue", job], check=False, timeout=60).returncode == 0:
            time.sleep(REQUEUE_SECONDS)
    return code if code >= 0 else 128 - code


def step_command(options: argparse.Namespace, node: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """`srun` with the command `node` once per node of the job."""
    if "SLURM_JOB_ID" not in environ:
        raise OptionError("--in-allocation: this is no Slurm job; leave the option out to submit one")
    if "SLURM_HET_SIZE" in environ or options.het:
        raise OptionError("--in-allocation: this is for jobs of one kind of node; submit others with --het")
    if shutil.which("srun") is None:
        raise OptionError("--in-allocation: there is no 'srun' here; call this outside of the container")
    here = argparse.Namespace(**vars(options))
    here.nodes = len(expand_nodes(environ["SLURM_JOB_NODELIST"]))
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    here.cpus_per_task = options.cpus_per_task or (int(cpus) if cpus else None)
    words = ["srun", "--overlap", "--ntasks-per-node=1", *srun_arguments(here)]
    return [*words, *container_words(options), *node]
