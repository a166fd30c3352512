"""The command line for authors."""

import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.agents.chat.analysis import analyse_template
from openrlhf.agents.cli import main
from support.agents_templates import CHATML, LLAMA3, MISTRAL, NO_GENERATION_PROMPT, QWEN3, TRIMMING, TemplateTokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def run(*argv):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in argv])
    return stop.value.code


def test_init_writes_an_agent_that_works(tmp_path, capsys):
    file = tmp_path / "my_agent.py"
    assert run("init", file) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_agent.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert run("check", file, "--label", "apple", "--answer", "an apple") == 0
    assert "ok: nothing found" in capsys.readouterr().out
    assert run("init", file) == 2
    assert "exists already" in capsys.readouterr().err
    assert run("init", tmp_path / "not a module") == 2


def test_new_writes_a_project_that_works(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "my-project"
    assert run("new", folder) == 0
    monkeypatch.chdir(folder)
    done = subprocess.run([sys.executable, "-m", "unittest"], capture_output=True, text=True, check=False)
    assert (done.returncode, "Ran 3 tests" in done.stderr) == (0, True), done.stderr
    for file in ("environment.py", "reward.py"):
        assert run("check", file, "--data", "prompts.jsonl", "--answer", "apple", "--answer", "pear") == 0
        assert "ok: nothing found" in capsys.readouterr().out
    assert run("new", folder) == 2
    assert "exists already" in capsys.readouterr().err
    assert run("new", tmp_path / "not a name") == 2


def test_check_shows_the_transcript_with_masks(capsys):
    assert run("check", EXAMPLES / "agent_func.py", "--answer", "hi", "--episodes", "1") == 0
    out = capsys.readouterr().out
    assert "⟦hi<|end|>⟧\n\nHuman: [INCORRECT]" in out
    assert "reward 1.0" in out
    assert "3 turn(s)" in out


AGENT = """
from openrlhf.utils.agent import AgentInstanceBase
class A(AgentInstanceBase):
    async def step(self, states, **kwargs):
        return {step}
"""


@pytest.mark.parametrize(
    ("step", "finding"),
    [
        ('{"rewards": 1.0, "environment_feedback": "", "done": False}', "never done"),
        ('{"rewards": "x", "environment_feedback": "", "done": True}', '"rewards" must be one number'),
        ('{"rewards": 1.0, "environment_feedback": ""}', "['done'] missing"),
        ('{"rewards": 1.0, "environment_feedback": 3, "done": True}', '"environment_feedback" as str'),
        ("undefined_name", "NameError"),
    ],
)
def test_check_names_contract_violations(tmp_path, capsys, step, finding):
    file = tmp_path / "agent.py"
    file.write_text(AGENT.replace("{step}", step))
    assert run("check", file, "--max-turns", "5") == 1
    assert finding in capsys.readouterr().out


def test_check_finds_feedback_that_breaks_the_template(tmp_path, capsys):
    file = tmp_path / "agent.py"
    step = '{"rewards": 0.0, "environment_feedback": "<|end|>again", "done": states["turn"] == 1}'
    file.write_text(AGENT.replace("{step}", step))
    assert run("check", file, "--chat-template") == 1
    out = capsys.readouterr().out
    assert "the feedback of turn 1 does not end with '<|assistant|>'" in out
    assert "begins with the end token" in out


def test_check_of_an_unusable_file(capsys):
    assert run("check", "no_such_agent.py") == 2
    assert "file not found: 'no_such_agent.py'" in capsys.readouterr().err


TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", "append-only for plain turns", []),
    "llama3": (LLAMA3, "<|eot_id|>", "append-only for plain turns", ["blanks around an answer"]),
    "mistral": (MISTRAL, "</s>", "It refuses: with a system message", []),
    "qwen3": (QWEN3, "<|im_end|>", "append-only for plain turns", ["reasoning in <think>"]),
    "trimming": (TRIMMING, "<|im_end|>", "append-only for plain turns", ["blanks around an answer"]),
    "no generation prompt": (NO_GENERATION_PROMPT, "<|im_end|>", "append-only for plain turns", []),
}


@pytest.mark.parametrize(("template", "eos", "advice", "broken"), TEMPLATES.values(), ids=TEMPLATES)
def test_template_analysis(template, eos, advice, broken):  # F17
    report = analyse_template(TemplateTokenizer(template, eos))
    assert report.usable
    assert advice in report.advice
    assert [o.name for o in report.outcomes if o.detail] == broken
    if broken:
        assert "it wrote" in str(report)


def test_templates_that_cannot_work_are_named():  # F17
    report = analyse_template(TemplateTokenizer(None))
    assert not report.usable
    assert "no chat template" in str(report)
    refusing = analyse_template(TemplateTokenizer("{{ raise_exception('never') }}"))
    assert not refusing.usable
    assert "refuses plain turns" in refusing.advice
