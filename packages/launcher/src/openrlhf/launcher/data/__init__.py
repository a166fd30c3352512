"""Prompt and supervised data readers."""
