"""`openrlhf-launch status` and `openrlhf-launch logs`."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from openrlhf.launcher.command_line import USAGE_EXIT
from openrlhf.launcher.slurm.names import expand_nodes, parse_job_id
from openrlhf.launcher.slurm.states import GOING_ON, MAYBE_BACK, SETTLE_SECONDS, UNKNOWN, JobState, Pauses, read_states
from openrlhf.launcher.subcommand_parser import SubcommandParser

FOLLOW_PAUSE = 0.5
SILENCE, LONGEST_SILENCE = 2.0, 60.0
"""Seconds without anything new in a log after which Slurm is asked about its job, at first and in the end."""


def status(argv: Sequence[str]) -> int:
    """Print a line per job: those named, else all that have logs here."""
    parser = SubcommandParser("status", "States of jobs.")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="job ids (default: all in the log folder)")
    parser.add_argument("--log-dir", default="slurm_logs", help="folder of the jobs' logs")
    options = parser.parse_args(argv)
    try:
        jobs = [str(parse_job_id(text).job) if text.isdigit() else text for text in options.jobs]
        for job in jobs:
            parse_job_id(job)
    except ValueError as error:
        sys.stderr.write(f"openrlhf-launch status: {error}\n")
        return USAGE_EXIT
    named = bool(jobs)
    jobs = jobs or known_jobs(Path(options.log_dir))
    try:
        states = read_states(jobs)
        unknown = [state.job_id for state in states if state.state == UNKNOWN]
        if unknown:
            check_slurm()
    except ValueError as error:
        sys.stderr.write(f"openrlhf-launch status: {error}\n")
        return USAGE_EXIT
    sys.stdout.write(table(states) + "\n" if jobs else f"no jobs in {options.log_dir!r}\n")
    if named and unknown:
        sys.stderr.write(f"openrlhf-launch status: {unknown_job(', '.join(unknown))}\n")
    return 1 if named and unknown else 0


def check_slurm() -> None:
    """Raises ValueError where there is no program of Slurm to ask."""
    if not any(shutil.which(name) for name in ("scontrol", "sacct", "squeue")):
        raise ValueError("there is no scontrol, sacct or squeue here: run this on a login node of a Slurm cluster")


def unknown_job(job: str) -> str:
    """What to say of a job that Slurm does not know."""
    return f"Slurm knows no job {job}: it was submitted to another cluster, or it ended too long ago"


def known_jobs(folder: Path) -> list[str]:
    """Ids of the jobs with a folder of logs."""
    names = [p.name for p in folder.iterdir() if p.name.split("_")[0].isdigit()] if folder.is_dir() else []
    return sorted({name.split("_")[0] for name in names}, key=int)


def table(states: Sequence[JobState]) -> str:
    """Aligned columns."""
    rows = [("JOB", "STATE", "EXIT", "RESTARTS", "NODES", "REASON")]
    rows += [(s.job_id, s.state, str(s.exit_code), str(s.restarts), s.nodes or "-", s.reason or "-") for s in states]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def logs(argv: Sequence[str]) -> int:
    """Print a job's log: the head's, or that of --node."""
    parser = SubcommandParser("logs", "The log of a job.")
    parser.add_argument("job", metavar="JOB", help="a job id, or an array task as 123_4")
    parser.add_argument("-f", "--follow", action="store_true", help="print what is added, until the job ends")
    parser.add_argument("--node", default="0", help="a node's name or its number (default: 0, the head)")
    parser.add_argument("--log-dir", default="slurm_logs", help="folder of the jobs' logs")
    options = parser.parse_args(argv)
    try:
        states = read_states([options.job])
        path = log_file(options.job, options.node, Path(options.log_dir), states)
    except ValueError as error:
        sys.stderr.write(f"openrlhf-launch logs: {error}\n")
        return USAGE_EXIT
    if options.follow:
        follow(options.job, path, states)
    else:
        _print_from(path, 0)
    return 0


def follow(job: str, path: Path, states: Sequence[JobState]) -> None:
    """Print what is added to a log until its job has ended for good.

    A log that grows is of a job that runs: Slurm is asked only when it has been silent, less and less often.
    """
    pauses = Pauses(SILENCE, LONGEST_SILENCE)
    offset, doubt = _print_from(path, 0), None
    ask_at = time.monotonic() + pauses.next()
    while not all(state.ended and state.state not in MAYBE_BACK for state in states):
        time.sleep(FOLLOW_PAUSE)
        before, offset, now = offset, _print_from(path, offset), time.monotonic()
        if offset > before:
            pauses.news()
            ask_at = now + pauses.next()
        elif now >= ask_at:
            states, ask_at = read_states([job]), now + pauses.next()
            going_on = any(state.state in GOING_ON for state in states)
            doubt = None if going_on else doubt or now
            if doubt is not None and now - doubt >= SETTLE_SECONDS:
                gone = states[0].state == UNKNOWN
                sys.stderr.write(f"openrlhf-launch logs: {unknown_job(job) if gone else states[0].state}\n")
                break
    _print_from(path, offset)


def log_file(job: str, node: str, folder: Path, states: Sequence[JobState]) -> Path:
    """The file that holds a node's output. Raises ValueError if there is none."""
    parse_job_id(job)
    state = states[0]
    index = node if node.isdigit() else _index_of(node, states)
    path = folder / job / f"{job}_{index}_log.out"
    if any("+" in state.job_id for state in states):
        # srun numbers the tasks of a heterogeneous job's groups with gaps (Slurm 22.05: 0, 2, 4), in their order
        there = sorted(path.parent.glob(f"{job}_*_log.out"), key=lambda file: int(file.name.split("_")[1]))
        path = dict(enumerate(there)).get(int(index), path)
    if path.exists():
        return path
    if index == "0" and state.output and Path(state.output).exists():
        return Path(state.output)  # of a batch script that this program did not write
    if state.state == "PENDING":
        raise ValueError(f"job {job} waits ({state.reason or 'no reason given'}): it has no log yet")
    if state.state == UNKNOWN:
        check_slurm()
        raise ValueError(f"{unknown_job(job)}; and there is no log {str(path)!r}: give the job's --log-dir")
    raise ValueError(f"there is no log {str(path)!r}: give the job's --log-dir")


def _index_of(node: str, states: Sequence[JobState]) -> str:
    nodes = [name for state in states if state.nodes for name in expand_nodes(state.nodes)]
    if node not in nodes:
        raise ValueError(f"--node {node!r} is not among the job's nodes {nodes!r}: give its number")
    return str(nodes.index(node))


def _print_from(path: Path, offset: int) -> int:
    if not path.exists():
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
    return offset + len(data)
