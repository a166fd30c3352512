"""`openrlhf-agents new NAME`: a project with an environment, a reward, prompts and a test. `init`: an agent alone."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

AGENT = '''"""An environment: asks the model for a word and tells it what was wrong until it is right."""

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
REWARD = '''"""A reward function: for one answer to each prompt, without an environment."""

from openrlhf.agents.graders.text import exact


def reward_func(queries, prompts, labels, responses, **kwargs):
    """All samples of one prompt in one call. queries: prompt and response; responses: without the prompt."""
    return {"rewards": [float(exact(response, label)) for response, label in zip(responses, labels, strict=True)]}
'''
TEST = '''"""Runs the environment against a scripted model: no GPU, no torch. {command}"""

import unittest

from openrlhf.agents.testing import run_episode

from {module} import AgentExecutor


class TestEnvironment(unittest.TestCase):
    def test_second_attempt_is_right(self):
        trajectory = run_episode(AgentExecutor, ["a pear", "an apple"], prompt="Name a fruit: ", label="apple")
        self.assertEqual(trajectory.reward, 1.0)
        self.assertEqual(trajectory.extra_logs, {{"attempts": 2.0}})

    def test_gives_up_after_three_attempts(self):
        trajectory = run_episode(AgentExecutor, ["a pear"], prompt="Name a fruit: ", label="apple")
        self.assertEqual(trajectory.reward, 0.0)
        self.assertEqual(len(trajectory.turns), 3)
'''
REWARD_TEST = """
    def test_reward(self):
        rewards = reward_func(["2+2= 4", "2+2= 5"], ["2+2= "] * 2, ["4"] * 2, ["4", "5"])["rewards"]
        self.assertEqual(rewards, [1.0, 0.0])
"""
PROMPTS = """{"prompt": "Name a fruit: ", "label": "apple"}
{"prompt": "Name a colour: ", "label": "blue"}
{"prompt": "Name an animal: ", "label": "dog"}
{"prompt": "Name a number: ", "label": "7"}
"""
PROJECT = """[project]
name = "{name}"
version = "0.1.0"
description = "An environment and a reward to train on"
requires-python = ">=3.11"
dependencies = ["openrlhf-agents>={version}"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""
README = """# {name}

```bash
pip install openrlhf-agents                       # all that tests and checks need
python -m unittest                                # or pytest
openrlhf-agents check environment.py --data prompts.jsonl --answer apple --answer pear
openrlhf-agents check reward.py --data prompts.jsonl --answer apple --answer pear
OPENAI_API_KEY=... openrlhf-agents eval environment.py --data prompts.jsonl --samples 8 \\
   --base-url http://127.0.0.1:8000/v1 --model my-model --output traces.jsonl
```

Train with the whole of OpenRLHF, the files as they are:

```bash
python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-0.6B \\
   --data.prompt_dataset prompts.jsonl --data.input_key prompt --data.label_key label \\
   --train.agent_func_path environment.py
```

or, for one answer to each prompt, `--reward.remote_url reward.py` in place of the last line.
"""


def add_new(commands: Any) -> None:
    parser = commands.add_parser("new", help="write a project: environment, reward, prompts, test")
    parser.add_argument("name", help="the folder to make, for example my-environment")


def run_new(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.name)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", folder.name):
        raise ValueError(f"the project must be named like a package, for example my-environment, got {folder.name!r}")
    test = TEST.format(command="python -m unittest", module="environment") + REWARD_TEST
    files = {
        "environment.py": AGENT,
        "reward.py": REWARD,
        "test_environment.py": test.replace(
            "import AgentExecutor\n", "import AgentExecutor\nfrom reward import reward_func\n"
        ),
        "prompts.jsonl": PROMPTS,
        "pyproject.toml": PROJECT.format(name=folder.name, version=version("openrlhf-agents")),
        "README.md": README.format(name=folder.name),
    }
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists already and is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"wrote {', '.join(files)} to {folder}")
    print(f"next: cd {folder} && python -m unittest   and   openrlhf-agents check environment.py --data prompts.jsonl")
    return 0


def add_init(commands: Any) -> None:
    parser = commands.add_parser("init", help="write an agent file and its test into a project that is there")
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
    test.write_text(TEST.format(command=f"python -m unittest {test.name}", module=agent.stem), encoding="utf-8")
    print(f"wrote {agent} and {test}")
    print(f"next: python -m unittest {test}   and   openrlhf-agents check {agent} --label apple --answer 'an apple'")
    return 0
