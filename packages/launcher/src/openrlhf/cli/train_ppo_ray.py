"""`python -m openrlhf.cli.train_ppo_ray`: RL training."""

from __future__ import annotations

import sys

from openrlhf.launcher.command_line import train_ppo_ray as main

if __name__ == "__main__":
    sys.exit(main())
