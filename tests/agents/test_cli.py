"""The command line for authors."""

import http.server
import json
import subprocess
import sys
import threading
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


def test_run_over_a_dataset(tmp_path, capsys):
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps({"q": f"{i}?", "a": str(i)}) + "\n" for i in (1, 2, 3)))
    file = EXAMPLES / "agent_func_number_guessing.py"
    code = run(
        "run", file, "--data", data, "--input-key", "q", "--label-key", "a", "--answer", "2", "--samples", "2",
        "--output", output, "--limit", "2",
    )  # fmt: skip
    assert code == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert all(len(row["token_ids"]) == len(row["trainable"]) for row in rows)
    out = capsys.readouterr().out
    assert "score, mean                      0.5" in out
    assert run("run", file, "--data", data) == 2
    assert "no text in column 'prompt'; it has ['a', 'q']" in capsys.readouterr().err


def test_run_against_a_server(tmp_path, capsys):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            chat = self.path.endswith("/chat/completions")
            message = {"message": {"content": "5"}, "finish_reason": "stop"}
            answer = json.dumps({"choices": [message]}).encode() if chat and body["messages"] else b"{}"
            self.send_response(200 if chat else 404)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format, *args):
            pass

    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "guess", "label": "5"}\n')
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        code = run("run", EXAMPLES / "agent_func_number_guessing.py", "--data", data, "--base-url", url, "--model", "m")
        server.shutdown()
    assert code == 0
    assert "score, mean                      1" in capsys.readouterr().out


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
