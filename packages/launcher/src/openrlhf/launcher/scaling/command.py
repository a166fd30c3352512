"""`openrlhf-launch scale RUN --engines N`: more or fewer engines for a run that goes on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.launcher.redaction import report_error
from openrlhf.launcher.scaling.desk import Order, ask, find_desk
from openrlhf.launcher.subcommand_parser import SubcommandParser

ANSWER_SECONDS = 7200.0
"""For engines to load a large model, and for a step's update before the weights can be pushed."""
RUN_HELP = "folder of the run's --ckpt.path, or up to three levels above it"


def main(argv: Sequence[str]) -> int:
    """Ask the run and wait until it is so; returns the exit status."""
    parser = SubcommandParser(
        "scale",
        "Let engines join or leave a run that goes on. Those that join get the present weights before their first "
        "request; what those that leave were doing is done again by the others.",
        "%(prog)s RUN --engines N",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--engines", type=int, required=True, metavar="N", help="how many engines it is to have")
    parser.add_argument(
        "--timeout", type=float, default=ANSWER_SECONDS, metavar="SECONDS", help="most to wait (default: %(default)g)"
    )
    options = parser.parse_args(argv)
    if options.engines < 1:
        parser.error(f"--engines {options.engines}: a run needs one engine at least")
    if not options.timeout > 0:
        parser.error(f"--timeout {options.timeout:g}: give more than 0 seconds")
    try:
        said = ask(find_desk(options.run), Order(engines=options.engines), timeout=options.timeout)
    except (OSError, ValueError) as error:
        return report_error(error)
    sys.stdout.write(f"the run has {len(said['engines'])} engines: {', '.join(said['engines'])}\n")
    return 0
