"""`python -m openrlhf.cli.serve_rm`: a reward model behind HTTP."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.launcher.command_line import run_command
from openrlhf.launcher.commands import SERVE_RM
from openrlhf.launcher.supervised_config import ServeRMConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve; returns the exit status."""
    return run_command(SERVE_RM, argv, _serve)


def _serve(config: ServeRMConfig) -> int:
    from openrlhf.launcher.serving.serve import serve_rm  # imports torch: --help must not

    return serve_rm(config)


if __name__ == "__main__":
    sys.exit(main())
