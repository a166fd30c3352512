"""`openrlhf-launch logs`."""

from openrlhf.launcher.slurm.watch import logs as main

__all__ = ["main"]
