"""An agent that knows nothing of us is trained: a program with the official clients, on the whole stack.

Its clients choose a temperature of their own, which is honoured: the trainer's log-probs are those of the engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from openrlhf.launcher.record.files import ABOUT
from openrlhf.launcher.record.reader import Record
from support.stack_runs import make_workspace, running
from support.tiny_models import tiny_qwen3

pytestmark = [
    pytest.mark.proof,
    pytest.mark.stack,
    pytest.mark.timeout(1500),
    pytest.mark.alarms("engine_trainer_drift"),  # constrained answers have log-probs among what was allowed
]

WIRES = ("Chat Completions", "Messages", "Responses")
"""Of the kinds of episodes, in order."""
PROGRAM = """
import sys

kind, question = int(sys.argv[1][-1]) % 3, sys.argv[1]
asked = [{"role": "user", "content": question}]
more = {"role": "user", "content": "more"}
if kind == 0:
    import openai

    create = openai.OpenAI().chat.completions.create
    first = create(model="gpt-x", messages=asked, temperature=0.5).choices[0].message
    last = create(model="gpt-x", messages=[*asked, first, more], temperature=0.5).choices[0].message.content
elif kind == 1:
    import anthropic

    create, warm = anthropic.Anthropic().messages.create, {"temperature": 0.5}
    first = create(model="claude-x", max_tokens=8, messages=asked, extra_body=warm)
    history = [*asked, {"role": "assistant", "content": first.content}, more]
    last = create(model="claude-x", max_tokens=8, messages=history, extra_body=warm).content[0].text
else:
    import openai

    create = openai.OpenAI().responses.create
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes", "no"]}}}
    first = create(model="gpt-x", input=question, temperature=0.5)
    last = create(model="gpt-x", input="more", previous_response_id=first.id, text=form).output_text
    assert last in ('"yes"', '"no"'), last
with open("answer.txt", "w", encoding="utf-8") as file:
    file.write(last)
"""
AGENT = """
from openrlhf.agents.chat.process import ProcessAgent


class AgentExecutor(ProcessAgent):
    command = ({python!r}, {program!r}, "{{prompt}}")
    reward_command = ({python!r}, "-c", "print(len(open('answer.txt', encoding='utf-8').read()) / 10)")
"""


def test_an_unmodified_program_is_trained(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path, tiny_qwen3(tmp_path / "model"), prompts=8)
    workspace.without = ("reward.remote_url", "data.max_len")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "agent.py").write_text(AGENT.format(python=sys.executable, program=str(tmp_path / "program.py")))
    rows = [{"prompt": f"sort {i}", "label": i} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "train.agent_func_path": "agent.py",
        "agent.client_sampling": "honour",
        "data.max_len": 128,
        "train.max_steps": 2,
    }
    with running(workspace, *(word for k, v in flags.items() for word in (f"--{k}", str(v)))) as run:
        assert run.wait(1200) == 0, run.text[-6000:]
    (about,) = tmp_path.rglob(ABOUT)
    record = Record.open(about.parent)
    apart: dict[str, float] = {}
    for step in record.complete_steps():
        for sample in record.samples(step):
            assert len(sample.turns) == 2
            assert sample.reward is not None
            assert sample.trainer_logprobs is not None
            kind = int(sample.prompt[-1]) % 3
            free = sample.turns[: 1 if kind == 2 else 2]  # the other is constrained, and off-policy
            assert [turn.temperature for turn in free] == [0.5] * len(free)
            for turn in free:
                own = slice(turn.start, turn.end)
                engine, trainer = sample.engine_logprobs[own], sample.trainer_logprobs[own]
                apart[WIRES[kind]] = max(apart.get(WIRES[kind], 0.0), float(np.abs(engine - trainer).max()))
    print(f"largest difference of log-probs between engine and trainer, by format: {apart}")
    assert set(apart) == set(WIRES)
    assert max(apart.values()) < 1e-4
