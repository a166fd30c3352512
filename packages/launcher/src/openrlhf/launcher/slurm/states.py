"""States of jobs, from squeue, scontrol and sacct: whichever is there and knows the job."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GOING_ON = frozenset(
    {
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "CONFIGURING",
        "SUSPENDED",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESIZING",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "STOPPED",
        "RESV_DEL_HOLD",
    }
)
UNKNOWN = "UNKNOWN"
MAYBE_BACK = frozenset({"PREEMPTED", "NODE_FAIL"})
"""States that a requeue may follow at once."""
SETTLE_SECONDS = 60.0
"""So long such a state must stay before a waiting client believes it."""

Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job or array task. exit_code: of its script, 128 + n if signal n ended it. nodes: in Slurm's compact form."""

    job_id: str
    state: str
    exit_code: int = 0
    restarts: int = 0
    reason: str = ""
    nodes: str = ""
    output: str = ""

    @property
    def ended(self) -> bool:
        return self.state not in GOING_ON and self.state != UNKNOWN

    @property
    def status(self) -> int:
        """The exit status for a client that waited: the job's own, 1 if it failed without one."""
        return self.exit_code or (0 if self.state == "COMPLETED" else 1)


def run_program(command: Sequence[str]) -> str:
    """What a program prints; empty if it is missing, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_states(job_ids: Sequence[str], run: Run = run_program) -> list[JobState]:
    """One entry per job, per task of an array, per part of a heterogeneous job; UNKNOWN where no program knows it.

    Each program is asked once at most, however many jobs there are: a controller serves a whole cluster.
    """
    if not job_ids:
        return []
    listed, one = ",".join(job_ids), job_ids[0] if len(job_ids) == 1 else ""
    asked = (
        lambda: from_scontrol(run(["scontrol", "-o", "show", "job", *([one] if one else [])])),
        lambda: from_sacct(run(["sacct", "-n", "-P", "-X", "-j", listed, "-o", SACCT_FIELDS])),
        lambda: from_squeue(run(["squeue", "-h", "-t", "all", "-j", listed, "-o", SQUEUE_FORMAT])),
    )
    found: dict[str, list[JobState]] = {}
    for ask in asked:
        if missing := [job for job in job_ids if job not in found]:
            rows = ask()
            found |= {job: own for job in missing if (own := [r for r in rows if _belongs(r.job_id, job)])}
    unknown = "no Slurm program knows this job"
    return [s for job in job_ids for s in found.get(job) or [JobState(job_id=job, state=UNKNOWN, reason=unknown)]]


def _belongs(row: str, job: str) -> bool:
    """Whether a row is of a job: itself, a task of it or a part of it."""
    return row == job or row.startswith((f"{job}_", f"{job}+"))


SACCT_FIELDS = "JobID,State,ExitCode,NodeList"
SQUEUE_FORMAT = "%i|%T|%r|%N"


def from_scontrol(text: str) -> list[JobState]:
    """Rows of `scontrol -o show job`."""
    rows = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines() if "JobId=" in line]
    return [
        JobState(
            job_id=_name(r),
            state=plain_state(r.get("JobState", "")),
            exit_code=exit_status(r.get("ExitCode", "")),
            restarts=int(r.get("Restarts", "0")),
            reason=_given(r.get("Reason", "")),
            nodes=_given(r.get("NodeList", "")),
            output=_given(r.get("StdOut", "")),
        )
        for r in rows
    ]


def _name(row: Mapping[str, str]) -> str:
    if "ArrayTaskId" in row:
        return f"{row['ArrayJobId']}_{row['ArrayTaskId']}"
    if row.get("HetJobOffset", "0") != "0":
        return f"{row['HetJobId']}+{row['HetJobOffset']}"
    return row["JobId"]


def from_sacct(text: str) -> list[JobState]:
    """Rows of `sacct -n -P -X -o JobID,State,ExitCode,NodeList`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 3]
    return [
        JobState(job_id=r[0], state=plain_state(r[1]), exit_code=exit_status(r[2]), nodes=_given(r[3])) for r in rows
    ]


def from_squeue(text: str) -> list[JobState]:
    """Rows of `squeue -h -o "%i|%T|%r|%N"`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 3]
    return [JobState(job_id=r[0], state=plain_state(r[1]), reason=_given(r[2]), nodes=_given(r[3])) for r in rows]


def plain_state(text: str) -> str:
    """`CANCELLED by 1000` and `CANCELLED+` are CANCELLED."""
    words = text.split()
    return words[0].rstrip("+") if words else UNKNOWN


def exit_status(text: str) -> int:
    """`17:0` is 17, `0:9` (signal 9) is 137."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return 0
    return int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0)


def _given(text: str) -> str:
    return "" if text in ("None", "(null)", "None assigned") else text


class Pauses:
    """How long to wait before Slurm is asked again: longer each time, from `first` to `most` seconds, until news."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self.news()

    def news(self) -> None:
        """Something has changed: ask soon."""
        self._next = self._first

    def next(self) -> float:
        """Seconds until the next question."""
        now, self._next = self._next, min(self._next * 1.5, self._most)
        return now


def wait_for(
    job_id: str,
    read: Callable[[str], list[JobState]] = lambda job_id: read_states([job_id]),
    *,
    pause: float = 3.0,
    longest: float = 30.0,
    settle: float = SETTLE_SECONDS,
    tell: Callable[[JobState], None] = lambda state: None,
) -> list[JobState]:
    """Until the job, with all its tasks, has ended for good: a pre-empted or requeued job goes on.

    Slurm is asked every `pause` seconds, and less and less often, down to every `longest`, while nothing changes. A job
    that no program knows counts as ended after `settle` seconds. `tell` hears of every new state.
    """
    told: dict[str, str] = {}
    doubt: float | None = None
    pauses = Pauses(pause, longest)
    while True:
        states = read(job_id)
        for state in states:
            if told.get(state.job_id) != state.state:
                told[state.job_id] = state.state
                pauses.news()
                tell(state)
        going_on = any(s.state in GOING_ON for s in states)
        if not going_on and all(s.ended and s.state not in MAYBE_BACK for s in states):
            return states
        doubt = None if going_on else doubt or time.monotonic()
        if doubt is not None and time.monotonic() - doubt >= settle:
            return states
        time.sleep(pauses.next())
