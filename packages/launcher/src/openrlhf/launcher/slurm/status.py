"""`openrlhf-launch status`."""

from openrlhf.launcher.slurm.watch import status as main

__all__ = ["main"]
