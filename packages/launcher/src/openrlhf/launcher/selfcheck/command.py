"""`openrlhf-launch selfcheck`: run the rows that this machine can, print a table, keep the outcome for `doctor`."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from importlib import metadata
from typing import Any, NoReturn

from openrlhf.launcher.machine import detect_machine
from openrlhf.launcher.selfcheck import record
from openrlhf.launcher.selfcheck.process import Report, run_all, skipped
from openrlhf.launcher.selfcheck.table import ROWS, Allowance, Row, chosen, lacking
from openrlhf.launcher.subcommand_parser import SubcommandParser

USAGE_EXIT = 2
WIDTH = 16


def read_options(argv: Sequence[str], rows: Sequence[Row] = ROWS) -> Namespace:
    """What the words ask for; `wanted` are the rows. Raises ValueError for one that does not exist."""
    parser = SubcommandParser(
        "selfcheck",
        "Try out what a run relies on: gradients, weight pushes into a real engine, steps; on models made on the spot.",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these rows")
    parser.add_argument("--list", action="store_true", help="list the rows and what each needs, and run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON, with all numbers and the logs of failed rows")
    options = parser.parse_args(argv)
    options.wanted = chosen(options.only, rows)
    return options


def main(argv: Sequence[str], rows: Sequence[Row] = ROWS) -> int:
    """Run the check. Returns 0 if nothing failed, else 1; 2 for a row that does not exist."""
    try:
        options = read_options(argv, rows)
    except ValueError as error:
        sys.stderr.write(f"openrlhf-launch selfcheck: {error}\n")
        return USAGE_EXIT
    wanted: list[Row] = options.wanted
    if options.list:
        sys.stdout.write(listing(wanted, as_json=options.json) + "\n")
        return 0
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        reports = _run_all(wanted, quiet=options.json)
    finally:
        signal.signal(signal.SIGTERM, before)
    outcome = _keep(reports, [row.name for row in rows])
    if options.json:
        sys.stdout.write(json.dumps(outcome, indent=1) + "\n")
    else:
        sys.stdout.write(summary(reports) + "\n")
    return int(any(report.result == "failed" for report in reports))


def _terminated(signum: int, frame: object) -> NoReturn:
    """End like any error, so that the row's processes are ended too."""
    raise SystemExit(128 + signum)


def _run_all(rows: Sequence[Row], *, quiet: bool) -> list[Report]:
    gpus = detect_machine().gpus
    packages = {name for name in needed_packages(rows) if _there(name)}
    why = {row.name: lacking(row, gpus=gpus, packages=packages) for row in rows}
    allowance = Allowance(gpus=gpus)
    running = run_all([row for row in rows if not why[row.name]], allowance.of)
    reports = []
    with closing(running):
        for row in rows:
            reports.append(skipped(row, why[row.name]) if why[row.name] else next(running))
            if not why[row.name]:
                allowance.spent(row, reports[-1].seconds)
            if not quiet:
                sys.stdout.write(line(reports[-1]) + "\n")
                sys.stdout.flush()
    return reports


def needed_packages(rows: Sequence[Row]) -> set[str]:
    """Distributions that some rows need."""
    return {need.removeprefix("package:") for row in rows for need in row.needs if need.startswith("package:")}


def _there(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _keep(reports: Sequence[Report], order: Sequence[str]) -> dict[str, Any]:
    """Record the outcome; one that can't be written is said and changes nothing else."""
    file, around = record.path(), record.surroundings()
    try:
        record.save(file, record.merged(record.load(file), reports, around, order))
    except OSError as error:
        sys.stderr.write(f"the outcome could not be kept for `openrlhf-launch doctor` in {str(file)!r}: {error}\n")
    return record.merged(None, reports, around, order)


def line(report: Report) -> str:
    """A row of the table, and below a failed one the fix and the end of its log."""
    took = "" if report.result == "skipped" else f" ({report.seconds:g} s)"
    lines = [f"{report.result:<8}{report.name:<{WIDTH}}{report.detail}{took}"]
    if report.fix:
        lines.append(f"{'':<8}fix: {report.fix}")
    if report.log:
        lines += [f"{'':<8}| {text}" for text in report.log.splitlines()[-8:]]
    return "\n".join(lines)


def summary(reports: Sequence[Report]) -> str:
    """How many rows were ok, failed and skipped."""
    counts = {result: sum(r.result == result for r in reports) for result in ("ok", "failed", "skipped")}
    return ", ".join(f"{count} {result}" for result, count in counts.items())


def listing(rows: Sequence[Row], *, as_json: bool) -> str:
    """The rows without running them."""
    if as_json:
        fields = [{"name": r.name, "shows": r.shows, "needs": r.needs or ("cpu",), "bound_s": r.bound_s} for r in rows]
        return json.dumps(fields, indent=1)
    return "\n".join(f"{row.name:<{WIDTH}}{row.shows} [{', '.join(row.needs) or 'cpu'}]" for row in rows)
