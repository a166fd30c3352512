"""`openrlhf-launch report RUN [--compare RUN ...]`: what a run did, as one page for a browser."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from openrlhf.launcher.redaction import report_error
from openrlhf.launcher.subcommand_parser import SubcommandParser
from openrlhf.learner.folders.files import replace_file

MIB = 1 << 20
FILE = "report.html"


def main(argv: Sequence[str]) -> int:
    """Write the page, or serve it with --live; returns the exit status."""
    options = _parser().parse_args(argv)
    folders = [options.run, *options.compare]
    from openrlhf.launcher.report.page import write_page  # pyarrow and numpy: --help must not
    from openrlhf.launcher.report.run_files import read_run

    try:
        runs = [read_run(folder) for folder in folders]
        if options.live:
            from openrlhf.launcher.report.live import serve

            return serve(folders, port=options.port)
        began = time.monotonic()
        target = options.output or runs[0].folder / FILE
        replace_file(target, write_page(runs, max_bytes=int(options.max_mb * MIB)))
    except (OSError, ValueError) as error:
        return report_error(error)
    size = target.stat().st_size / MIB
    sys.stdout.write(f"report: {target.resolve()} ({size:.1f} MiB, {time.monotonic() - began:.1f} s)\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = SubcommandParser(
        "report",
        "Curves, phases, alarms, configuration and episodes of a run in one page, which opens without network.",
        "%(prog)s RUN [options]",
    )
    parser.add_argument(
        "run", metavar="RUN", help="folder of the run: of its logs or its record, or up to three levels above them"
    )
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="further runs on the same page")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"where the page is written (default: {FILE} beside the run's logs)"
    )
    parser.add_argument(
        "--max-mb",
        type=float,
        default=15.0,
        metavar="MIB",
        help="most that the page may take; where all tokens need more, it holds those of the worst and best samples",
    )
    parser.add_argument(
        "--live", action="store_true", help="serve the page on this machine while the run goes on, with all its samples"
    )
    parser.add_argument("--port", type=int, default=0, help="port of --live (default: a free one)")
    return parser
