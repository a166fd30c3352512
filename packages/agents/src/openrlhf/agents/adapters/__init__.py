"""Environments of other projects as executors."""
