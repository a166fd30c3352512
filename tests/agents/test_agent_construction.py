"""Agent classes whose construction is a coroutine, hangs, blocks, or cannot work at all."""

import json
import subprocess
import sys
import textwrap

import pytest

from openrlhf.agents.agent_file import check_agent_file, load_executor
from openrlhf.agents.cli import main
from openrlhf.agents.executor import MultiTurnAgentExecutor
from openrlhf.agents.files import CodeFile, CodeFileError
from openrlhf.agents.testing import run_episode, run_group
from openrlhf.agents.types import StopReason
from openrlhf.agents.watchdog import BLOCKED_EXIT_CODE
from support.agents_blocking import BLOCKING

ASYNC_INIT = """
import asyncio
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        await asyncio.sleep(0)
        self.steps = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.steps += 1
        return {"rewards": 1.0, "environment_feedback": ".", "done": self.steps == 2}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture
def agent_file(tmp_path):
    path = tmp_path / "my_agent.py"
    path.write_text(ASYNC_INIT)
    return path


def test_r06_an_asynchronous_constructor_is_awaited_for_every_sample(agent_file):
    check_agent_file(agent_file)
    samples = run_group(load_executor(agent_file), ["x"], n_samples=3)
    assert [(s.failure, s.reward, len(s.turns)) for s in samples] == [(None, 2.0, 2)] * 3


def test_r06_in_the_commands_for_authors(agent_file, tmp_path, capsys):
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for command in (["check", agent_file], ["eval", agent_file, "--data", data, "--output", output]):
        with pytest.raises(SystemExit) as stop:
            main(list(map(str, command)))
        assert stop.value.code == 0
    assert "ok: nothing found" in capsys.readouterr().out
    assert [json.loads(row)["reward"] for row in output.read_text().splitlines()] == [2.0, 2.0]


class Agent:
    async def reset(self, states):
        return states

    async def step(self, states):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


def test_r06_a_coroutine_function_may_make_the_agents():
    async def make():
        return Agent()

    assert run_episode(MultiTurnAgentExecutor(make), ["x"]).reward == 1.0


def test_r06_a_constructor_that_hangs_or_raises_fails_its_sample():
    class Hanging(Agent):
        async def __init__(self):
            import asyncio

            await asyncio.Event().wait()

    class Raising(Agent):
        async def __init__(self):
            raise KeyError("boom")

    hanging = run_episode(Hanging, ["x"], timeout=0.05)
    assert hanging.failure is not None
    assert (hanging.stop_reason, hanging.failure.message) == (
        StopReason.TIMEOUT,
        "__init__() took longer than `agent.timeout` 0.05 s",
    )
    raising = run_episode(Raising, ["x"])
    assert raising.failure is not None
    assert (raising.failure.border, raising.failure.message) == ("agent", "KeyError: 'boom'")


def test_r06_an_asynchronous_constructor_that_blocks_the_loop_is_reported_by_file_and_line(tmp_path):
    program = textwrap.dedent(BLOCKING).replace("{statement}", "pass")
    program = program.replace("class Agent:", "class Agent:\n    async def __init__(self):\n        time.sleep(60)\n")
    file = tmp_path / "blocking_agent.py"
    file.write_text(program)
    line = next(i for i, text in enumerate(program.splitlines(), 1) if "time.sleep(60)" in text)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == BLOCKED_EXIT_CODE
    assert f"by __init__() in {file}:{line}" in done.stderr


WRONG_AGENTS = {
    "needs arguments": ("def __init__(self, size): pass", "made without arguments, one for each sample: missing"),
    "needs arguments, asynchronous": ("async def __init__(self, size): pass", "made without arguments"),
    "step without states": ("async def step(self): pass", r"expected step\(self, states\): too many"),
}


@pytest.mark.parametrize(("line", "message"), WRONG_AGENTS.values(), ids=WRONG_AGENTS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_r06_agents_that_fail_every_sample_are_refused_before_anything_starts(line, message, wrapped):
    source = f"""
from openrlhf.utils.agent import MultiTurnAgentExecutor
class Agent:
    async def reset(self, states): return states
    async def step(self, states): return {{}}
    {line}
"""
    if wrapped:
        source += "class AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self): super().__init__(Agent)\n"
    with pytest.raises(CodeFileError, match=message):
        check_agent_file(CodeFile(path="/nowhere/agent.py", source=source))


def test_r06_an_executor_with_an_asynchronous_constructor_is_refused_before_anything_starts():
    source = ASYNC_INIT.replace(
        "    def __init__(self):\n        super", "    async def __init__(self):\n        super"
    )
    with pytest.raises(CodeFileError, match=r"AgentExecutor.__init__ in .* is a coroutine, and nothing awaits it"):
        check_agent_file(CodeFile(path="/nowhere/agent.py", source=source))


def test_an_agent_class_is_no_instance():
    with pytest.raises(CodeFileError, match="takes an agent class, not an instance"):
        MultiTurnAgentExecutor(Agent())  # type: ignore[arg-type]
