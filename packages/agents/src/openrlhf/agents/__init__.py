"""The agent SDK: what environment and reward authors install. Standard library only."""
