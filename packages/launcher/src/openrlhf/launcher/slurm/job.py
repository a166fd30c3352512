"""What submitit pickles and calls on every node, and its checkpoint hook."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from submitit.helpers import DelayedSubmission

from openrlhf.launcher.slurm.node import make_runner
from openrlhf.launcher.slurm.requeue import REQUEUE_EXIT
from openrlhf.launcher.slurm.runner import NodeRunner
from openrlhf.launcher.slurm.spec import NodeSpec


@dataclass
class Job:
    """A run. It names no checkpoint: every life starts from the newest one."""

    spec: NodeSpec
    runner: NodeRunner | None = field(default=None, repr=False)

    def __call__(self) -> int:
        """Run this node's part and end the process with its status.

        Signals are ours from here on: the runner turns a warning into a checkpoint, and the batch script, which is
        outside of any container, requeues the job.
        """
        runner = make_runner(self.spec)
        runner.signals.install()
        code = runner.run()
        if code:
            sys.exit(code)
        return code

    def checkpoint(self) -> DelayedSubmission:
        """submitit's hook, called when a warning comes before the runner has the signals: nothing was lost yet."""
        if "SLURM_JOB_ID" in os.environ:
            sys.exit(REQUEUE_EXIT)
        return DelayedSubmission(Job(self.spec))

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "runner": None}
