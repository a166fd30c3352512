"""Proxies from the environment: loopback stays direct, NO_PROXY knows networks, failures name the proxy."""

import http.server
import json
import threading

import pytest

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.cli import main
from openrlhf.agents.proxies import keep_loopback_direct, proxy_of
from openrlhf.agents.testing import run_episode

DEAD = "http://user:secret@127.0.0.1:9"
AGENT = """
class Agent:
    async def reset(self, states):
        return states
    async def step(self, states):
        return {"rewards": float(states["action_text"] == "four"), "environment_feedback": "", "done": True}
"""
CHAT_AGENT = """
from openai import AsyncOpenAI
from openrlhf.agents.chat.executor import OpenAIServerExecutor

class AgentExecutor(OpenAIServerExecutor):
    async def run_agent(self, prompt, label, session_id):
        async with AsyncOpenAI(base_url=self.session_url(session_id), api_key=self.api_key, max_retries=0) as client:
            messages = [{"role": "user", "content": prompt}]
            answer = await client.chat.completions.create(model="policy", messages=messages)
        return float(answer.choices[0].message.content == label)
"""


@pytest.fixture
def proxied(monkeypatch):
    """A cluster-wide proxy that nobody answers."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name.upper(), DEAD)
    for name in ("no_proxy", "NO_PROXY"):  # set, so that what is added to them goes again
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("url", "no_proxy", "direct"),
    [
        ("http://localhost:5000/get_reward", "", True),
        ("http://LOCALHOST/", "", True),
        ("http://a.localhost/", "", True),
        ("http://127.0.0.1:80/", "", True),
        ("http://127.8.9.10/", "", True),
        ("http://[::1]:80/", "", True),
        ("http://[::ffff:127.0.0.1]/", "", True),
        ("http://0.0.0.0:5000/", "", True),
        ("http://10.1.2.3/", "", False),
        ("http://10.1.2.3/", "10.0.0.0/8", True),
        ("http://10.1.2.3/", "11.0.0.0/8", False),
        ("http://10.1.2.3/", "example.com, 10.1.0.0/16", True),
        ("http://10.1.2.3/", "10.1.2.3", True),
        ("http://10.1.2.3/", "10.1.2.30", False),
        ("http://10.1.2.3/", "1.2.3", False),
        ("http://10.1.2.3:5000/", "10.1.2.3:5000", True),
        ("http://10.1.2.3:5000/", "10.1.2.3:5001", False),
        ("http://[fd00::7]:5000/", "fd00::/8", True),
        ("http://[fd00::7]:5000/", "[fd00::]/8", True),
        ("http://[fd00::7]:5000/", "[fd00::7]:5000", True),
        ("http://[fd00::7]:5000/", "fd00::7", True),
        ("http://[fe80::7]/", "fd00::/8", False),
        ("http://node1/", "10.0.0.0/8", False),
        ("http://node1/", "node1", True),
        ("http://node1:5000/", "node1:5000", True),
        ("https://node1/", "node1:443", True),
        ("http://node1/", "node1:443", False),
        ("http://gpu.cluster.local/", ".cluster.local", True),
        ("http://gpu.cluster.local/", "*.cluster.local", True),
        ("http://gpu.cluster.local/", "Cluster.Local", True),
        ("http://notcluster.local/", "cluster.local", False),
        ("http://anything/", "*", True),
        ("http://anything/", "http://anything", True),
    ],
)
def test_r04_what_goes_through_a_proxy(url, no_proxy, direct):
    environ = {"HTTP_PROXY": "http://proxy:3128", "HTTPS_PROXY": "proxy:3129", "NO_PROXY": no_proxy}
    assert (proxy_of(url, environ) is None) == direct


def test_r04_which_variable_counts():
    host = "https://host/"
    assert proxy_of(host, {"HTTP_PROXY": "http://a:1"}) is None
    assert proxy_of(host, {}) is None
    both = proxy_of(host, {"HTTPS_PROXY": "http://a:1", "https_proxy": "b:2"})
    assert both is not None
    assert (both.url, both.variable) == ("http://b:2", "https_proxy")
    assert proxy_of(host, {"HTTPS_PROXY": "http://a:1", "https_proxy": ""}) is None
    assert proxy_of(host, {"ALL_PROXY": "socks5://a:1"}) is not None
    assert proxy_of(host, {"HTTPS_PROXY": "http://a:1", "NO_PROXY": "host", "no_proxy": ""}) is not None


def test_r04_a_proxy_is_named_without_its_password():
    named = str(proxy_of("http://host/", {"http_proxy": "http://user:secret@proxy:3128"}))
    assert named == "the proxy http://***@proxy:3128 of http_proxy; hosts in NO_PROXY are asked without it"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"NO_PROXY": "x"}, {"NO_PROXY": "x"}),
        ({"HTTP_PROXY": "p"}, {"no_proxy": "localhost,127.0.0.1,::1", "NO_PROXY": "localhost,127.0.0.1,::1"}),
        (
            {"https_proxy": "p", "NO_PROXY": "a, localhost"},
            {"no_proxy": "a, localhost,127.0.0.1,::1", "NO_PROXY": "a, localhost,127.0.0.1,::1"},
        ),
        ({"all_proxy": "p", "no_proxy": "*"}, {"no_proxy": "*", "NO_PROXY": ""}),
    ],
)
def test_r04_clients_of_others_are_kept_off_the_proxy_on_loopback(before, after):
    environ = dict(before)
    keep_loopback_direct(environ)
    assert {name: environ.get(name, "") for name in after} == after
    again = dict(environ)
    keep_loopback_direct(again)
    assert again == environ


class Completions(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        answer = json.dumps({"choices": [{"text": "four", "finish_reason": "length"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format, *args):
        """Silent."""


@pytest.fixture
def served():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Completions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def check(file, base_url):
    with pytest.raises(SystemExit) as stop:
        main(["check", str(file), "--base-url", base_url, "--episodes", "1"])
    return stop.value.code


def test_r04_check_asks_a_server_on_loopback_without_the_proxy(proxied, served, tmp_path, capsys):
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    assert check(file, served) == 0
    assert "reward 1.0" in capsys.readouterr().out
    assert check(file, "http://192.0.2.1/v1") == 1
    printed = capsys.readouterr().out
    assert "the proxy http://***@127.0.0.1:9 of HTTP_PROXY" in printed
    assert "secret" not in printed


def test_r04_an_agent_reaches_the_chat_server_past_the_proxy(proxied, tmp_path):
    file = tmp_path / "chat_agent.py"
    file.write_text(CHAT_AGENT)
    trajectory = run_episode(load_executor(file), ["4"], prompt="2+2?", label="4")
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
