"""Whether a run that was warned, or lost a node, is put back into the queue."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from openrlhf.learner.checkpoint_dir import STEP_NAME

REQUEUE_EXIT = 85
"""Exit status of the step: the batch script requeues the job. The same number as the trainer's "saved" status."""
REFUSED_EXIT = 86
"""The run was warned or lost a node, and may not be requeued."""
VERDICT = "OPENRLHF_REQUEUE_FILE"
"""A file that the batch script looks for: it is there where the head wants the job to be requeued."""


@dataclass(frozen=True)
class Decision:
    """Requeue or not, and why."""

    requeue: bool
    reason: str


def newest_step(checkpoints: Path | None) -> int:
    """The step of the newest complete checkpoint; -1 without one."""
    if checkpoints is None or not checkpoints.is_dir():
        return -1
    matches = [STEP_NAME.fullmatch(path.name) for path in checkpoints.iterdir()]
    return max((int(m[1]) for m in matches if m), default=-1)


def decide(*, restarts: int, limit: int, before: int, after: int, preempted: bool = False) -> Decision:
    """before, after: newest checkpoint when this life began and now. A pre-empted life owes no progress."""
    if restarts >= limit:
        return Decision(False, f"it was restarted {restarts} times, --max-restarts is {limit}")
    if after <= before and not preempted:
        where = f"still at step {after}" if after >= 0 else "there is none"
        return Decision(False, f"this life added no checkpoint ({where}): give it more --time or save more often")
    return Decision(True, f"restart {restarts + 1} of at most {limit}, from step {after}")


def was_preempted(job_id: int) -> bool:
    """Whether Slurm is taking the nodes for another job. False where `scontrol` is out of reach, as in a container."""
    if shutil.which("scontrol") is None:
        return False
    command = ["scontrol", "-o", "show", "job", str(job_id)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    found = re.search(r"PreemptTime=(\S+)", done.stdout)
    return found is not None and found[1] not in ("None", "Unknown")


def requeue(job_id: int) -> None:
    """Put the job back into the queue now; Slurm then ends its processes.

    Where `scontrol` is missing, as in a container, the batch script does it after the step.
    """
    if verdict := os.environ.get(VERDICT):
        Path(verdict).touch()
    if shutil.which("scontrol") is not None:
        subprocess.run(["scontrol", "requeue", str(job_id)], timeout=60, check=False)


def forbid_requeue(job_id: int) -> None:
    """Tell Slurm not to start the job again on its own, as it does after the loss of a node."""
    if shutil.which("scontrol") is not None:
        subprocess.run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"], timeout=60, check=False)
