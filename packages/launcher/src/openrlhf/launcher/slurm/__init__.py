"""Runs on Slurm allocations: submission, the process on each node, states and logs of jobs."""
