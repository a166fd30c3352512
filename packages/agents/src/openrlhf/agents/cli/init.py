"""`openrlhf-agents init`: a working agent file and its test."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

AGENT = '''"""An agent: asks the model for a word and tells it what was wrong until it is right."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

ATTEMPTS = 3


class AgentInstance(AgentInstanceBase):
    """One environment, one episode: a new instance is made for every sample."""

    async def reset(self, states, **kwargs):
        """states: observation (the prompt), label. Returns the text to start from."""
        self.attempts = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        """states: observation_text (all before the answer), action_text (the answer), label, sampling_params."""
        self.attempts += 1
        right = states["label"] in states["action_text"]
        done = right or self.attempts == ATTEMPTS
        return {
            "rewards": 1.0 if right else 0.0,  # rewards of all turns add up
            "environment_feedback": "" if done else "\\n\\nThat is not it. Try again: ",
            "done": done,
            "extra_logs": {"attempts": self.attempts},  # numbers to log
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """What --train.agent_func_path looks for."""

    def __init__(self):
        super().__init__(AgentInstance)
'''
TEST = '''"""Runs the agent against a scripted model: pytest {name}"""

from openrlhf.agents.testing import run_episode

from {module} import AgentExecutor


def test_second_attempt_is_right():
    trajectory = run_episode(AgentExecutor, ["a pear", "an apple"], prompt="Name a fruit: ", label="apple")
    assert trajectory.reward == 1.0
    assert trajectory.extra_logs == {{"attempts": 2.0}}


def test_gives_up_after_three_attempts():
    trajectory = run_episode(AgentExecutor, ["a pear"], prompt="Name a fruit: ", label="apple")
    assert trajectory.reward == 0.0
    assert len(trajectory.turns) == 3
'''


def add_init(commands: Any) -> None:
    parser = commands.add_parser("init", help="write a working agent file and its test")
    parser.add_argument("file", nargs="?", default="my_agent.py", help="the agent file to write (default: %(default)s)")


def run_init(arguments: argparse.Namespace) -> int:
    agent = Path(arguments.file)
    if agent.suffix != ".py" or not agent.stem.isidentifier():
        raise ValueError(f"the file must be named like a Python module, for example my_agent.py, got {agent.name!r}")
    test = agent.with_name(f"test_{agent.name}")
    for path in (agent, test):
        if path.exists():
            raise FileExistsError(f"{path} exists already")
    agent.parent.mkdir(parents=True, exist_ok=True)
    agent.write_text(AGENT, encoding="utf-8")
    test.write_text(TEST.format(name=test.name, module=agent.stem), encoding="utf-8")
    print(f"wrote {agent} and {test}")
    print(f"next: pytest {test}   and   openrlhf-agents check {agent} --label apple --answer 'an apple'")
    return 0
