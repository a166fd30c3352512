"""Every shipped agent file runs."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.environments import read_environments
from openrlhf.agents.testing import run_episode, run_group
from openrlhf.agents.testing.episodes import make_context
from openrlhf.agents.types import PromptItem
from support.agents_templates import CHATML, QWEN3, TemplateTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def load(name):
    return load_executor(EXAMPLES / f"{name}.py")


def through_server(name, script, prompt, label, template=CHATML):
    async def main():
        executor = load(name)
        try:
            item = PromptItem(group_id="g", prompt=prompt, label=label)
            context = make_context(script, tokenizer=TemplateTokenizer(template), timeout=60.0)
            context.engine.tokenizer = context.tokenizer  # type: ignore[attr-defined]
            return await executor.run_group(item, context)
        finally:
            await executor.close()  # type: ignore[attr-defined]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("answers", "reward", "feedback"),
    [
        (["4", "6", "5"], 1.0, ["<|user|>+<|end|><|assistant|>", "<|user|>-<|end|><|assistant|>"]),
        (["x", "5"], 1.0, ["<|user|>?<|end|><|assistant|>"]),
        (["1", "2", "3"], 0.0, ["<|user|>+<|end|><|assistant|>"] * 2),
    ],
)
def test_number_guessing(answers, reward, feedback):
    t = run_episode(load("agent_func_number_guessing"), answers, "<|user|>guess 1-7<|end|><|assistant|>", label="5")
    assert (t.reward, len(t.turns)) == (reward, len(answers))
    from openrlhf.agents.testing import ByteTokenizer

    said = [t.token_ids[a.end : b.start] for a, b in zip(t.turns, t.turns[1:], strict=False)]
    assert [ByteTokenizer().decode(ids) for ids in said] == feedback


@pytest.mark.parametrize("name", ["agent_func_openai_server_executor", "agent_func_number_guessing_server"])
def test_server_agents(name):  # O01
    (t,) = through_server(name, ["4", "5"], "guess 1-7", "5")
    assert not t.failed, t.failure
    assert t.reward == (0.5 if "executor" in name else 1.0)
    assert len(t.turns) == 2


def test_calculator():
    answers = ["I need <calc>12*(3+4)</calc>", "<answer>84</answer>"]
    t = run_episode(load("agent_func_calculator"), answers, "12*(3+4)=?", label="84")
    assert (t.reward, t.extra_logs) == (1.0, {"tool_calls": 1.0, "answered": 1.0})
    wrong = run_episode(load("agent_func_calculator"), ["no answer"], "x", label="84")
    assert wrong.reward == 0.0


def test_mcp_agent():
    pytest.importorskip("mcp")
    call = {"name": "calculate", "arguments": {"first": 6, "sign": "*", "second": 7}}
    script = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "It is 42."]
    (t,) = through_server("agent_func_mcp", script, "6*7=?", "42", template=QWEN3)
    assert not t.failed, t.failure
    assert (t.reward, t.extra_logs["mcp/calls"], t.extra_logs["mcp/errors"]) == (1.0, 1.0, 0.0)
    assert "<tool_response>\n42.0\n</tool_response>" in TemplateTokenizer(QWEN3).decode(t.token_ids)


@pytest.mark.parametrize(
    ("expression", "value"), [("1/4", "0.25"), ("-(2+3)", "-5"), ("1/0", "error"), ("2**9", "error"), ("a", "error")]
)
def test_calculate(expression, value):
    spec = importlib.util.spec_from_file_location("calculator", EXAMPLES / "agent_func_calculator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.calculate(expression).startswith(value)


def test_code_agent():
    answers = ["```python\ndef f(x): return x\n```", "```python\ndef f(x): return x + 1\n```"]
    t = run_episode(load("agent_func_code"), answers, "write f", label="assert f(1) == 2", timeout=60.0)
    assert (t.reward, t.score, len(t.turns)) == (1.0, 1.0, 2)
    io = [{"input": "3\n", "output": "6"}]
    t = run_episode(load("agent_func_code"), ["print(2 * int(input()))"], "double", label=io, timeout=60.0)
    assert t.reward == 1.0


def test_groups_of_the_guides_agent():
    group = run_group(load("agent_func"), ["a"], n_samples=4)
    assert [(t.reward, t.sample_index) for t in group] == [(1.0, i) for i in range(4)]


def test_environments():
    table = read_environments(str(EXAMPLES / "environments.toml"))
    assert table is not None
    assert (table.names, table.column, table.scored) == (["calculator", "code", "maths"], "task", True)
    assert sum(e.ratio or 0 for e in table.environments) == 5
