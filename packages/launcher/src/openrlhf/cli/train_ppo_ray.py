"""`python -m openrlhf.cli.train_ppo_ray`: RL training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.launcher.command_line import run_command
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit status."""
    return run_command(TRAIN_PPO_RAY, argv, _train)


def _train(config: TrainPPOConfig) -> int:
    from openrlhf.launcher.run import train_ppo  # imports torch: --help must not

    return train_ppo(config)


if __name__ == "__main__":
    sys.exit(main())
