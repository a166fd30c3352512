"""Reward sources that need the launcher's libraries."""
