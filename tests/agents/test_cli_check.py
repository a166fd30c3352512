"""What `openrlhf-agents check` finds in environments and rewards."""

import json
import subprocess
import sys

import pytest

from openrlhf.agents.cli import main

AGENT = """
import asyncio, random, time
from openrlhf.utils.agent import AgentInstanceBase
class A(AgentInstanceBase):
    async def step(self, states, **kwargs):
        answer = states["action_text"].removesuffix("<|end|>")
        {before}
        return {{"rewards": {reward}, "environment_feedback": "", "done": True}}
"""


def check(tmp_path, capsys, *argv, before="pass", reward="float(answer == '4')", source=None):
    """The exit code and the JSON of a check with a right answer and a wrong one."""
    file = tmp_path / "subject.py"
    file.write_text(source or AGENT.format(before=before, reward=reward))
    with pytest.raises(SystemExit) as stop:
        main(["check", str(file), "--json", "--prompt", "2+2=", "--answer", "4", "--answer", "5", *argv])
    out = capsys.readouterr().out
    return stop.value.code, json.loads(out) if out else {}


def texts(found):
    return [("error: " if f["error"] else "hint: ") + f["text"] for f in found["findings"]]


def test_a_sound_environment(tmp_path, capsys):
    code, found = check(tmp_path, capsys)
    assert (code, found["findings"]) == (0, [])
    by_model = {e["model"]: e for e in found["episodes"]}
    assert len(by_model) == 13
    assert by_model["ends at once"]["trained_tokens"] == 1
    assert by_model["never ends"]["ended"] == "length"
    assert by_model["gives no token"]["trained_tokens"] == 0
    assert (found["rewards"]["min"], found["rewards"]["max"], found["rewards"]["count"]) == (0.0, 1.0, 14)
    assert found["throughput"]["episodes_per_second"] > 0


def test_rewards_that_differ_for_the_same_answers(tmp_path, capsys):
    code, found = check(tmp_path, capsys, reward="random.random()")
    assert code == 1
    assert any(
        t.startswith("error: the same answers were judged twice and differently (the script)") for t in texts(found)
    )
    code, found = check(tmp_path, capsys, "--random", reward="random.random()")
    assert code == 0
    assert any(t.startswith("hint: the same answers") for t in texts(found))


@pytest.mark.parametrize(
    ("before", "reward", "finding"),
    [
        ("json = __import__('json').loads(answer)", "0.0", "with a model that nests brackets: agent: JSONDecodeError"),
        ("1 / len(answer)", "0.0", "with a model that ends at once: agent: ZeroDivisionError"),
        ("pass", "float(len(answer) or 'nan')", "with a model that gives no token: agent: "),
        ("await asyncio.sleep(9 * ('again' in answer))", "0.0", "with a model that never ends: timeout: "),
    ],
)
def test_what_only_a_model_that_misbehaves_shows(tmp_path, capsys, before, reward, finding):
    code, found = check(tmp_path, capsys, "--timeout", "1.5", before=before, reward=reward)
    assert code == 1
    assert any(finding in text for text in texts(found)), texts(found)


def test_worthless_answers_that_are_paid(tmp_path, capsys):
    code, found = check(tmp_path, capsys, reward="float('4' in answer)")
    assert code == 0
    assert texts(found) == ["hint: the highest reward (1) went to a model that lists all numbers"]
    code, found = check(tmp_path, capsys, reward="0.5")
    assert (code, texts(found), found["rewards"]["deviation"]) == (0, [], 0.0)


def test_code_that_blocks_the_loop_is_named(tmp_path):
    file = tmp_path / "subject.py"
    file.write_text(AGENT.format(before="time.sleep(600)", reward="0.0"))
    main_call = "from openrlhf.agents.cli import main; main()"
    command = [sys.executable, "-c", main_call, "check", str(file), "--timeout", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "blocked" in done.stdout
    assert f"{file}:7" in done.stdout


REWARD = """
import asyncio
def reward_func(queries, prompts, labels, responses, **kwargs):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "code", "finding"),
    [
        ("return [float(r.startswith('4')) for r in responses]", 0, None),
        ("return [0.0] * (len(queries) + 1)", 1, "reward"),
        ("return [1 / len(r.removesuffix('<|end|>')) for r in responses]", 1, "with a model that ends at once: reward"),
        ("import os; os._exit(3)", 1, "ended"),
        ("import time; time.sleep(99 * any('again' in r for r in responses)); return [0.0] * len(queries)", 1,
         "with a model that never ends: timeout"),
    ],
)  # fmt: skip
def test_reward_files(tmp_path, capsys, body, code, finding):
    got, found = check(tmp_path, capsys, "--timeout", "2", source=REWARD.format(body=body))
    assert got == code, found
    if finding:
        assert any(finding in text for text in texts(found)), texts(found)


def test_isolation_of_graded_programs_is_said(tmp_path, capsys):
    body = "from openrlhf.agents.graders.code import isolation\n    return [float(r[:1] == '4') for r in responses]"
    code, found = check(tmp_path, capsys, source=REWARD.format(body=body))
    assert code == 0
    assert "programs that it grades are kept apart by" in texts(found)[0]


def test_columns_of_a_row_travel(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text('{"q": "2+2=", "a": "4", "unit": "m"}\n')
    body = "return [float(u == 'm' and l == '4') for u, l in zip(kwargs['unit'], labels)]"
    argv = ("--data", str(data), "--input-key", "q", "--label-key", "a")
    code, found = check(tmp_path, capsys, *argv, source=REWARD.format(body=body))
    assert (code, found["rewards"]["min"]) == (0, 1.0), found
