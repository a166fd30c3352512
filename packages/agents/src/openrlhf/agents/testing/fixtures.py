"""Pytest fixtures: put `pytest_plugins = ["openrlhf.agents.testing.fixtures"]` into your conftest.py."""

from __future__ import annotations

import pytest

from openrlhf.agents.testing.engine import ScriptedEngine
from openrlhf.agents.testing.episodes import run_episode
from openrlhf.agents.testing.tokenizer import ByteTokenizer


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    """A tokenizer without files."""
    return ByteTokenizer()


@pytest.fixture
def scripted_engine():
    """A function: `scripted_engine(["answer one", "answer two"])` gives an engine that answers with these."""
    return ScriptedEngine


@pytest.fixture
def episode():
    """A function: `episode(MyAgent, ["an answer"], prompt="...", label="...")` gives the trajectory."""
    return run_episode
