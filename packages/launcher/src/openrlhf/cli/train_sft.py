"""`python -m openrlhf.cli.train_sft`: supervised fine-tuning."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.launcher.command_line import run_command, train_supervised
from openrlhf.launcher.commands import TRAIN_SFT


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit status."""
    return run_command(TRAIN_SFT, argv, train_supervised)


if __name__ == "__main__":
    sys.exit(main())
