"""The command `openrlhf-agents`: write, check and evaluate environments and rewards without a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from openrlhf.agents.cli.check import add_check, add_template, run_check, run_template
from openrlhf.agents.cli.evaluate import add_eval, run_eval
from openrlhf.agents.cli.new import add_init, add_new, run_init, run_new
from openrlhf.agents.files import CodeFileError
from openrlhf.agents.proxies import keep_loopback_direct

COMMANDS = {"new": run_new, "init": run_init, "check": run_check, "eval": run_eval, "template": run_template}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 0, 1 (something was found) or 2 (wrong use)."""
    parser = argparse.ArgumentParser(prog="openrlhf-agents", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_new, add_init, add_check, add_eval, add_template):
        add(commands)
    arguments = parser.parse_args(argv)
    keep_loopback_direct()
    try:
        sys.exit(COMMANDS[arguments.command](arguments))
    except (CodeFileError, FileExistsError, FileNotFoundError, ValueError, ImportError) as error:
        print(f"openrlhf-agents {arguments.command}: {error}", file=sys.stderr)
        sys.exit(2)
