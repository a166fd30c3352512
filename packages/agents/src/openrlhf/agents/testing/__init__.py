"""The test kit for agent authors: no GPU, no model, no download.

`ScriptedEngine` answers from a script, `ByteTokenizer` needs no files, `run_episode` runs an agent once and gives the
trajectory. Pytest fixtures: `pytest_plugins = ["openrlhf.agents.testing.fixtures"]`.
"""

from openrlhf.agents.testing.engine import ScriptedEngine as ScriptedEngine
from openrlhf.agents.testing.episodes import make_context as make_context
from openrlhf.agents.testing.episodes import run_episode as run_episode
from openrlhf.agents.testing.episodes import run_group as run_group
from openrlhf.agents.testing.tokenizer import ByteTokenizer as ByteTokenizer
