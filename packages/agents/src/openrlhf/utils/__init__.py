"""Public import paths for agent authors; see `openrlhf.utils.agent`."""
