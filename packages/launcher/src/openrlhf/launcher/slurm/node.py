"""`python -m openrlhf.launcher.slurm.node JSON`: the node runner, for a step that `srun` starts once per node."""

from __future__ import annotations

import os
import sys

from openrlhf.launcher.machine import detect_machine
from openrlhf.launcher.slurm.allocation import read_allocation
from openrlhf.launcher.slurm.runner import START_EXIT, NodeRunner
from openrlhf.launcher.slurm.spec import NodeSpec, from_json

TOKEN = "OPENRLHF_JOB_TOKEN"
"""The job's secret. Made by the batch script for each life; never on a command line."""


def make_runner(spec: NodeSpec) -> NodeRunner:
    """The runner of this process. Raises ValueError outside of a job."""
    if not os.environ.get(TOKEN):
        raise ValueError(f"{TOKEN} is not set: start runs with `openrlhf-launch slurm`, which makes the secret")
    allocation = read_allocation(os.environ, detected_gpus=detect_machine().gpus)
    return NodeRunner(spec, allocation, os.environ[TOKEN])


def main(argv: list[str]) -> int:
    """Run this node's part; returns its exit status."""
    try:
        runner = make_runner(from_json(argv[0]))
    except ValueError as error:
        sys.stderr.write(f"openrlhf-launch: {error}\n")
        return START_EXIT
    runner.signals.install()
    return runner.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
