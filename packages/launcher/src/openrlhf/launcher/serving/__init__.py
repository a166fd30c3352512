"""The reward server: `python -m openrlhf.cli.serve_rm`."""
