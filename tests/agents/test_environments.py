"""Tables of several environments: read, checked, and who runs what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from openrlhf.agents.environments import EnvironmentTable, load_environments, read_environments
from openrlhf.agents.files import CodeFileError
from openrlhf.agents.rewards import normalize_rewards
from openrlhf.agents.testing import make_context
from openrlhf.agents.types import PromptItem

AGENTS = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

class Says(AgentInstanceBase):
    async def step(self, states, **kwargs):
        return {"rewards": self.worth, "environment_feedback": "", "done": True}

class One(Says):
    worth = 1

class Two(Says):
    worth = 2
"""


def table_of(folder, **files: str) -> EnvironmentTable:
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    table = read_environments(str(folder / next(iter(files)).replace("__", ".")))
    assert table is not None
    return table


def rewards_of(table, source=None, *, script=("x",)) -> dict[str, list[Any]]:
    """The rewards of two samples in every environment."""

    async def main():
        executor = load_environments(table, source)
        context = make_context(list(script), n_samples=2)
        try:
            return {name: [t.reward for t in await executor.run_group(item(name), context)] for name in table.names}
        finally:
            await executor.close()

    def item(name):
        return PromptItem(group_id="g", prompt="p", columns={"level": 5}, environment=name)

    return asyncio.run(main())


class Levels:
    async def score(self, queries, prompts, labels, *, responses=None, columns: Any = None):
        return normalize_rewards(columns["level"], len(queries))


TOML = """
column = "task"
max_failure_share = 0.5

[one]
agent = "agents.py:One"
ratio = 2

[two]
agent = "agents.py:Two"
ratio = 1
max_failure_share = 0
reward = "run"

[plain]
ratio = 1.5
"""


def test_a_toml_with_agents_of_one_file_and_an_answer_that_the_run_scores(tmp_path):
    table = table_of(tmp_path, table__toml=TOML, agents__py=AGENTS)
    assert (table.column, table.names, table.scored) == ("task", ["one", "two", "plain"], True)
    told = [(e.entry, e.ratio, e.max_failure_share, e.scored) for e in table.environments]
    assert told == [("One", 2.0, 0.5, False), ("Two", 1.0, 0.0, True), ("", 1.5, 0.5, True)]
    assert rewards_of(table, Levels()) == {"one": [1.0, 1.0], "two": [5.0, 5.0], "plain": [5.0, 5.0]}
    assert rewards_of(table) == {"one": [1.0, 1.0], "two": [None, None], "plain": [None, None]}


def test_a_table_in_python(tmp_path):
    source = AGENTS + (
        'ENVIRONMENT_COLUMN = "task"\nMAX_FAILURE_SHARE = 0.25\n'
        'print("hello")\n'
        'ENVIRONMENTS = {"one": {"agent": One, "ratio": 3}, "two": {"agent": Two, "ratio": 1, "reward": "run"}}\n'
    )
    table = table_of(tmp_path, table__py=source)
    assert (table.column, [(e.name, e.ratio, e.max_failure_share) for e in table.environments]) == (
        "task",
        [("one", 3.0, 0.25), ("two", 1.0, 0.25)],
    )
    assert rewards_of(table, Levels()) == {"one": [1.0, 1.0], "two": [5.0, 5.0]}


def test_a_table_of_classes_takes_the_datasource_and_all_prompts(tmp_path):
    table = table_of(tmp_path, table__py=AGENTS + 'ENVIRONMENTS: dict = {"one": One, "two": Two}\n')
    assert (table.column, [e.ratio for e in table.environments], table.scored) == ("datasource", [None, None], False)
    assert rewards_of(table) == {"one": [1.0, 1.0], "two": [2.0, 2.0]}


def test_a_file_of_one_agent_is_no_table(tmp_path):
    agent = "from openrlhf.utils.agent import AgentInstanceBase\nclass A(AgentInstanceBase):\n"
    agent += "    async def step(self, states, **kwargs): ...\n"
    (tmp_path / "agent.py").write_text(agent)
    assert read_environments(str(tmp_path / "agent.py")) is None


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("", "no environment: give a table such as"),
        ("[a", "no TOML: "),
        ("colum = 1\n[a]", r"unknown key 'colum'; there are column and max_failure_share"),
        ("column = 3\n[a]", "column must be the name of a field, got 3"),
        ("[a]\nratios = 1", r"\[a\]: unknown key 'ratios'; there are agent, ratio, max_failure_share, reward"),
        ("[a]\nratio = 0", r"\[a\]: ratio must be a number above 0, got 0"),
        ("[a]\nratio = true", r"\[a\]: ratio must be a number above 0, got True"),
        ("[a]\nratio = nan", r"\[a\]: ratio must be a number above 0, got nan"),
        ("[a]\nmax_failure_share = 1", "max_failure_share must be a number from 0 to below 1, got 1"),
        ("[a]\nratio = 1\n[b]", r"\[b\]: no ratio, but others have one"),
        ('[a]\nreward = "agent"', "without an agent it is \"run\", got 'agent'"),
        ('[a]\nreward = "me"', 'reward must be "agent" or "run"'),
        ("[a]\nagent = 3", 'agent must be a file such as "agent.py", got 3'),
        ('[a]\nagent = "none.py"', r"\[a\]: file not found"),
        ('[a]\nagent = "agents.py:Three"', "has no Three; its classes are One, Says, Two"),
        ('[a]\nagent = "agents.py:int"', "has no int"),
        ('[a]\nagent = "agents.py"', "exports .*; expected a class AgentExecutor"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path, toml, words):
    with pytest.raises(CodeFileError, match=words):
        table_of(tmp_path, table__toml=toml, agents__py=AGENTS)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("ENVIRONMENTS = []", "must be a dict of agents by name, got"),
        ('ENVIRONMENTS = {"a": 3}', r"ENVIRONMENTS\['a'\] in .* is no executor"),
        ('ENVIRONMENTS = {"a": Says, "b": str}', r"ENVIRONMENTS\['b'\] in .* is no agent"),
        ('ENVIRONMENTS = {"a": {"ratio": 1}}', "has no agent for 'a'"),
        ("ENVIRONMENTS = {3: Says}", "the name of an environment is a text, got 3"),
        ("ENVIRONMENTS = {}\n1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_is_wrong_with_a_table_in_python_is_said(tmp_path, table, words):
    with pytest.raises(CodeFileError, match=words):
        table_of(tmp_path, table__py=f"{AGENTS}\n{table}\n")


def test_no_such_file(tmp_path):
    with pytest.raises(CodeFileError, match=r"file not found: 'none\.toml'"):
        read_environments("none.toml")
