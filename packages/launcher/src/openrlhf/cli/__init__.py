"""Command-line entry points: parse, then call."""
