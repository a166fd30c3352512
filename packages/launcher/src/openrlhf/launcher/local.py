"""`openrlhf-launch local [--address HOST:PORT] -- <flags of train_ppo_ray>`: the run of `slurm`, here."""

from __future__ import annotations

import os
from collections.abc import Sequence

from openrlhf.launcher.command_line import train_ppo_ray
from openrlhf.launcher.plan.command import split_at_dashes
from openrlhf.launcher.subcommand_parser import SubcommandParser


def main(argv: Sequence[str]) -> int:
    """Train on the Ray of --address, a running one on this machine, or an own one. Returns the exit status."""
    own, flags = split_at_dashes(argv)
    parser = SubcommandParser(
        "local",
        "Train on this machine, or on a Ray cluster that is already there.",
        "%(prog)s [options] -- <flags of train_ppo_ray>",
    )
    parser.add_argument("--address", help="address of a running Ray, HOST:PORT")
    options = parser.parse_args(own)
    if options.address:
        os.environ["RAY_ADDRESS"] = options.address
    return train_ppo_ray(flags)
