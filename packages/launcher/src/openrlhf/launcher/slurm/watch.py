"""`openrlhf-launch status` and `openrlhf-launch logs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from openrlhf.launcher.command_line import USAGE_EXIT
from openrlhf.launcher.slurm.names import expand_nodes, parse_job_id
from openrlhf.launcher.slurm.states import JobState, read_states
from openrlhf.launcher.subcommand_parser import SubcommandParser

FOLLOW_PAUSE = 0.5


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
    jobs = jobs or known_jobs(Path(options.log_dir))
    sys.stdout.write(table(read_states(jobs)) + "\n" if jobs else f"no jobs in {options.log_dir!r}\n")
    return 0


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
        path = log_file(options.job, options.node, Path(options.log_dir))
    except ValueError as error:
        sys.stderr.write(f"openrlhf-launch logs: {error}\n")
        return USAGE_EXIT
    offset = _print_from(path, 0)
    while options.follow and not read_states([options.job])[0].ended:
        time.sleep(FOLLOW_PAUSE)
        offset = _print_from(path, offset)
    if options.follow:
        _print_from(path, offset)
    return 0


def log_file(job: str, node: str, folder: Path) -> Path:
    """The file that holds a node's output. Raises ValueError if there is none."""
    parse_job_id(job)
    state = read_states([job])[0]
    index = node if node.isdigit() else _index_of(node, state)
    path = folder / job / f"{job}_{index}_log.out"
    if path.exists():
        return path
    if index == "0" and state.output and Path(state.output).exists():
        return Path(state.output)  # of a batch script that this program did not write
    if state.state == "PENDING":
        raise ValueError(f"job {job} waits ({state.reason or 'no reason given'}): it has no log yet")
    raise ValueError(f"there is no log {str(path)!r}: give the job's --log-dir")


def _index_of(node: str, state: JobState) -> str:
    nodes = expand_nodes(state.nodes) if state.nodes else []
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
