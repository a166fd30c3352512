"""The command `openrlhf-agents`: write, check and run agents without a GPU."""

from openrlhf.agents.cli.main import main as main
