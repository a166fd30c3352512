"""Environments of verifiers, where that package is installed (Python >= 3.11; not in the default environment)."""

import asyncio
import json

import pytest

from openrlhf.agents.testing import ScriptedEngine, make_context
from openrlhf.agents.types import PromptItem, Trajectory
from support.agents_templates import TemplateTokenizer

TASKSET = '''
import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Sums", "Chat"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.branches[-1].messages[-1].content == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[Sum]):
    def load(self):
        return [Sum(Data(prompt=f"1+{i}", answer=str(1 + i)), self.config.task) for i in range(3)]


class Chat(vf.Harness[vf.HarnessConfig]):
    """Two calls in this process: the question, then a request to say it again."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as http:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                reply = await http.post(f"{endpoint}/chat/completions", json=body, timeout=60)
                reply.raise_for_status()
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")
'''
ENVIRONMENT = {"taskset": {"id": "toy_sums"}, "agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
def executor_class(tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    from openrlhf.agents.adapters.verifiers import VerifiersExecutor

    (tmp_path / "toy_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)

    class Executor(VerifiersExecutor):
        env_config = ENVIRONMENT

    return Executor


def roll_out(executor_class, answers, label, n_samples=1) -> list[Trajectory]:
    tokenizer = TemplateTokenizer()

    async def main():
        executor = executor_class()
        try:
            item = PromptItem(group_id="g", prompt="unused", label=label)
            engine = ScriptedEngine(answers, tokenizer=tokenizer)
            context = make_context(engine, tokenizer=tokenizer, n_samples=n_samples, timeout=120.0)
            return await executor.run_group(item, context)
        finally:
            await executor.close()

    return asyncio.run(main())


def test_an_episode(executor_class):
    (t,) = roll_out(executor_class, ["x", "3"], label="2")
    assert not t.failed, t.failure
    assert (t.reward, len(t.turns)) == (2.0, 2)
    assert t.extra_logs["reward/right"] == 1.0
    assert t.extra_logs["turns"] == 2.0
    assert TemplateTokenizer().decode(t.token_ids).startswith("<|im_start|>user\n1+2<|im_end|>")


def test_samples_of_a_group_do_not_mix(executor_class):
    group = roll_out(executor_class, ["1"], label=0, n_samples=4)
    assert [(t.reward, len(t.turns), t.sample_index) for t in group] == [(2.0, 2, i) for i in range(4)]


@pytest.mark.parametrize(("label", "text"), [("7", "the taskset has 3 tasks"), ("x", "is not the number of a task")])
def test_labels_that_name_no_task(executor_class, label, text):
    (t,) = roll_out(executor_class, ["1"], label=label)
    assert t.failure is not None
    assert text in t.failure.message


def test_the_dataset(executor_class, tmp_path):
    path = tmp_path / "prompts.jsonl"
    assert executor_class.write_prompts(path, limit=2) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"prompt": "1+0", "label": "0"}, {"prompt": "1+1", "label": "1"}]


def test_without_verifiers(monkeypatch):
    pytest.importorskip("starlette")
    from openrlhf.agents.adapters.verifiers import load_environment

    monkeypatch.setitem(__import__("sys").modules, "verifiers.v1.utils", None)
    with pytest.raises(ImportError, match=r"pip install 'openrlhf-agents\[verifiers\]'"):
        load_environment({"taskset": {"id": "x"}})
