"""Agents in processes of their own, as people have them: they know nothing but their environment."""

import asyncio
import json
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from openrlhf.agents.chat.process import ProcessAgent
from openrlhf.agents.testing import make_context
from openrlhf.agents.testing.engine import ScriptedEngine
from openrlhf.agents.testing.episodes import _run_and_close
from openrlhf.agents.types import PromptItem
from support.agents_chat import text_of
from support.agents_templates import TemplateTokenizer

CLIENTS = {
    "openai": """
        import openai
        answer = openai.OpenAI().chat.completions.create(
            model="gpt-x", messages=[{"role": "user", "content": sys.stdin.read()}])
        said = answer.choices[0].message.content
    """,
    "responses": """
        import openai
        said = openai.OpenAI().responses.create(model="gpt-x", input=sys.argv[1]).output_text
    """,
    "anthropic": """
        import anthropic
        message = {"role": "user", "content": sys.argv[1]}
        answer = anthropic.Anthropic().messages.create(model="claude-x", max_tokens=9, messages=[message])
        said = answer.content[0].text
    """,
}


def program(tmp_path, code):
    file = tmp_path / "agent.py"
    file.write_text("import os, sys, time\n" + textwrap.dedent(code))
    return file


def run(executor, *, label="one", **changes):
    tokenizer = TemplateTokenizer()
    engine = ScriptedEngine(["one"], tokenizer=tokenizer)
    item = PromptItem(group_id="g", prompt="hi", label=label, columns={"level": 3})
    context = make_context(engine, tokenizer=tokenizer, timeout=200.0, **changes)
    return asyncio.run(_run_and_close(executor, item, context))


def agent(tmp_path, code, **attributes):
    command = (sys.executable, str(program(tmp_path, code)), "{prompt}")
    return type("AgentExecutor", (ProcessAgent,), {"command": command, **attributes})()


@pytest.mark.parametrize("client", CLIENTS)
def test_an_unmodified_client_needs_its_environment_alone(client, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s")
    code = textwrap.dedent(CLIENTS[client]) + textwrap.dedent("""
        assert "SECRET_TOKEN" not in os.environ
        assert os.listdir(".") == ["task.txt"] and os.environ["HOME"] == os.getcwd()
        open("result.txt", "w").write(str(len(said)))
    """)
    files = tmp_path / "files"
    files.mkdir()
    (files / "task.txt").write_text("x")
    trajectories = run(agent(tmp_path, code, files=files, reward_file="result.txt"), n_samples=2)
    for t in trajectories:
        assert not t.failed, t.failure
        assert (t.reward, len(t.turns), t.extra_logs["process/status"]) == (3.0, 1, 0.0)
        expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>"
        assert text_of(t) == expected
    assert [path.name for path in files.iterdir()] == ["task.txt"]


ASKS = """
import json, urllib.request
def ask():
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_reward_by_exit_status(status, tmp_path):
    (t,) = run(agent(tmp_path, f"{ASKS}\nask()\nsys.exit({status})"))
    assert (t.reward, t.extra_logs["process/status"]) == (float(status == 0), float(status))


def test_reward_by_a_command_that_knows_the_label(tmp_path):
    code = f"{ASKS}\nassert 'OPENRLHF_LABEL' not in os.environ\nopen('said', 'w').write(ask()['id'] and 'one')"
    check = tmp_path / "check.py"
    check.write_text(
        "import json, os\nprint('log')\n"
        "print(json.dumps({'reward': float(open('said').read() == os.environ['OPENRLHF_LABEL']), 'scores': 0.5}))"
    )
    for label, reward in (("one", 1.0), ("two", 0.0)):
        (t,) = run(agent(tmp_path, code, reward_command=(sys.executable, str(check))), label=label)
        assert not t.failed, t.failure
        assert (t.reward, t.score) == (reward, 0.5)


def test_reward_by_a_server(tmp_path):
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"0.25")

        def log_message(self, format, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        (t,) = run(agent(tmp_path, f"{ASKS}\nask()\nprint('done')", reward_url=url))
    finally:
        server.shutdown()
        server.server_close()
    assert t.reward == 0.25
    assert seen == [{"prompt": "hi", "label": "one", "columns": {"level": 3}, "status": 0, "output": "done\n"}]


HELD = f"{ASKS}\nask()\nheld = b'x' * 2**28"
FAILURES = {
    "never asks": ("print('bye', file=sys.stderr)\nsys.exit(2)", {}, "agent", "2 and never asked the policy: bye"),
    "hangs": (f"{ASKS}\nask()\ntime.sleep(600)", {"timeout": 0.5}, "timeout", "not done after its timeout of 0.5 s"),
    "holds too much": (f"{HELD}\ntime.sleep(600)", {"memory_gib": 0.2}, "agent", "more than its 0.2 GiB"),
    "no reward": (f"{ASKS}\nask()", {"reward_file": "r"}, "reward", "left no r"),
    "a bad reward": (f"{ASKS}\nask()\nopen('r', 'w').write('x')", {"reward_file": "r"}, "reward", "neither a number"),
    "a bad command": ("", {"command": ("/no/such/program",)}, "agent", "/no/such/program cannot be started"),
    "two rewards": ("", {"reward_file": "a", "reward_url": "b"}, "agent", "set one of them"),
    "a command as text": ("", {"command": "a b"}, "agent", "one by one"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_process_that_fails_is_a_failed_sample(name, tmp_path):
    code, attributes, border, text = FAILURES[name]
    (t,) = run(agent(tmp_path, code, **attributes))
    assert t.failure is not None
    assert t.failure.border == border
    assert text in t.failure.message
    assert sum(t.trainable) == 0


def test_what_a_process_leaves_running_is_ended(tmp_path):
    mark = tmp_path / "pid"
    code = f"""{ASKS}
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(mark)!r}, "w").write(str(child.pid))
ask()
"""
    (t,) = run(agent(tmp_path, code))
    assert not t.failed, t.failure
    stat = f"/proc/{mark.read_text()}/stat"
    try:
        with open(stat) as file:
            assert file.read().split()[2] == "Z"
    except FileNotFoundError:
        pass
