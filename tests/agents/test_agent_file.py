"""Agent files, and the examples that users copy."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from openrlhf.agents.agent_file import check_agent_file, load_executor
from openrlhf.agents.executor import MultiTurnAgentExecutor
from openrlhf.agents.files import CodeFile, CodeFileError
from openrlhf.agents.testing import run_episode
from support.cpu_time import small_programs

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def code(source, name="agent.py"):
    return CodeFile(path=f"/nowhere/{name}", source=source)


AGENT = """
class AgentInstance(AgentInstanceBase):
    async def step(self, states, **kwargs):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}
"""
IMPORT = "from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor"


def test_only_an_agent_class_is_wrapped():
    executor = load_executor(code(IMPORT + AGENT))
    assert isinstance(executor, MultiTurnAgentExecutor)
    assert run_episode(executor, ["x"]).reward == 1.0


def test_a_class_without_the_base_class():  # F14
    source = AGENT.replace("(AgentInstanceBase)", "") + "\n    async def reset(self, states): return states"
    assert run_episode(load_executor(code(source)), ["x"]).reward == 1.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "exports no agent; expected a class AgentExecutor"),
        (IMPORT, "exports no agent"),
        ("class AgentExecutor:\n  pass", "is no executor"),
        (f"{IMPORT}\nclass AgentExecutor(MultiTurnAgentExecutor): pass", "needs arguments"),
        (f"{IMPORT}\nclass A(AgentInstanceBase): pass", r"does not implement \['step'\]"),
        (
            "from openrlhf.utils.agent import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase): pass",
            "'execute'",
        ),
    ],
)
def test_unusable_files(source, message):
    with pytest.raises(CodeFileError, match=message):
        load_executor(code(source))


def test_check_runs_in_another_process(tmp_path):
    file = tmp_path / "my_agent.py"
    file.write_text("import sys; sys.modules['left_behind'] = sys\n" + IMPORT + AGENT)
    assert check_agent_file(file).source == file.read_text()
    assert "left_behind" not in sys.modules
    file.write_text("raise RuntimeError('boom')")
    with pytest.raises(CodeFileError, match="boom"):
        check_agent_file(file)
    file.write_text("class A(:\n")
    with pytest.raises(CodeFileError, match=r"syntax error in .*my_agent.py, line 1"):
        check_agent_file(file, run=False)


def test_the_guides_agent():
    t = run_episode(load_executor(EXAMPLES / "agent_func.py"), ["first", "second", "third"], "question")
    assert (t.reward, t.score, len(t.turns), t.stop_reason) == (1.0, 1.0, 3, "done")
    assert t.extra_logs == {"step": 3.0}


@pytest.mark.parametrize("module", ["openrlhf.utils.agent", "openrlhf.agents.worker", "openrlhf.agents.reward_process"])
def test_imports_are_light(module):
    # W01: modules are counted; time is a ratio, since another machine has half the speed
    program = f"""
        import sys
        before = set(sys.modules)
        import {module}
        loaded = set(sys.modules) - before
        roots = {{name.partition(".")[0] for name in loaded if not name.startswith("_sysconfigdata")}}
        foreign = roots - set(sys.stdlib_module_names) - {{"openrlhf"}}
        assert not foreign, foreign
        print(len(loaded))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 200
    assert small_programs(f"import {module}") < 4
