"""`openrlhf-agents eval`: over a dataset, against servers, and what it writes."""

import asyncio
import json
from pathlib import Path

import pytest

from openrlhf.agents.cli import main, models
from openrlhf.agents.cli.models import ServerEngine
from openrlhf.agents.engine import EngineError, SamplingParams
from openrlhf.agents.testing import ByteTokenizer
from support.agents_chat import run as run_chat
from support.openai_server import TinyServer, chat_only

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
GUESSING = EXAMPLES / "agent_func_number_guessing.py"
REWARD = """
def reward_func(queries, prompts, labels, responses, **kwargs):
    return [float(r.removesuffix("<|end|>") == l) for r, l in zip(responses, labels)]
"""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i}?", "a": str(i)}) + "\n" for i in (1, 2, 3)))
    return path


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(models, "BACKOFF_SECONDS", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def evaluate(*argv):
    with pytest.raises(SystemExit) as stop:
        main(["eval", *map(str, argv)])
    return stop.value.code


def test_traces_and_pass_at_k(tmp_path, capsys, data, reward):
    output = tmp_path / "out.jsonl"
    keys = ("--input-key", "q", "--label-key", "a")
    answers = ("--answer", "1", "--answer", "2", "--answer", "2", "--answer", "9")
    code = evaluate(reward, "--data", data, *keys, *answers, "--samples", 4, "--k", 1, 2, "--output", output, "--json")
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["episodes"], found["failed"]) == (3, 12, 0)
    # Of 4 episodes each, 1, 2 and 0 pass: 1 - C(3, 2) / C(4, 2) = 0.5, 1 - C(2, 2) / C(4, 2) = 5/6, 0.
    assert found["pass@1"] == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    assert found["pass@2"] == pytest.approx((0.5 + 5 / 6 + 0) / 3)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 12
    assert all(len(row["token_ids"]) == len(row["trainable"]) == len(row["logprobs"]) for row in rows)
    assert {row["answers"][0] for row in rows} == {"1<|end|>", "2<|end|>", "9<|end|>"}
    assert rows[0]["text"].startswith(rows[0]["prompt"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input-key", "nope"], "no text in column 'nope'; it has ['a', 'q']"),
        (["--input-key", "q", "--samples", "2", "--k", "3"], "--k must lie between 1 and --samples (2), got [3]"),
        (["--input-key", "q", "--concurrency", "0"], "--concurrency must be at least 1"),
    ],
)
def test_wrong_use(capsys, data, reward, argv, message):
    assert evaluate(reward, "--data", data, *argv) == 2
    assert message in capsys.readouterr().err


def test_failed_episodes_pass_nothing(capsys, data, tmp_path):
    reward = tmp_path / "failing.py"
    reward.write_text(REWARD.replace("return [", "return [None if l == '2' else "))
    code = evaluate(reward, "--data", data, "--input-key", "q", "--label-key", "a", "--answer", "1", "--samples", 1)
    out = capsys.readouterr().out
    assert code == 0
    assert "failed        1\n" in out
    assert "pass@1        0.3333\n" in out


def test_several_turns_with_a_chat_server(capsys, tmp_path, data, monkeypatch):
    """Answers of the model are the assistant's messages, the rest is the user's; the key comes from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    agent = tmp_path / "agent.py"
    agent.write_text(
        "from openrlhf.utils.agent import AgentInstanceBase\n"
        "class A(AgentInstanceBase):\n"
        "    async def step(self, states, **kwargs):\n"
        "        right = states['label'] in states['action_text']\n"
        "        return {'rewards': float(right), 'environment_feedback': 'No. Again: ', 'done': right}\n"
    )
    with TinyServer(chat_only(lambda messages: str(len(messages) // 2 + 1))) as server:
        argv = ("--input-key", "q", "--label-key", "a", "--base-url", server.url, "--model", "m", "--concurrency", 1)
        assert evaluate(agent, "--data", data, *argv) == 0
    assert "pass@1        1\n" in capsys.readouterr().out
    assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer a-key"}
    last = max((body["messages"] for path, body, _ in server.requests if path == "/chat/completions"), key=len)
    assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in last] == ["3?", "1", "No. Again: ", "2", "No. Again: "]


async def generate(engine, ids, **sampling):
    return await engine.generate(ids, SamplingParams(max_tokens=8, **sampling))


def test_token_ids_where_the_server_takes_them():
    def answer(path, body):
        assert body["prompt"] == [1, 2, 3]
        logprobs = {"token_logprobs": [-0.5, -0.25]}
        return 200, {"choices": [{"text": "xy", "token_ids": [7, 8], "logprobs": logprobs, "finish_reason": "stop"}]}

    with TinyServer(answer) as server:
        got = asyncio.run(generate(ServerEngine(server.url, "m", ByteTokenizer(), ids=True), [1, 2, 3]))
    assert (list(got.token_ids), list(got.logprobs), got.finish_reason) == ([7, 8], [-0.5, -0.25], "stop")


def test_texts_where_it_does_not():
    def answer(path, body):
        if isinstance(body["prompt"], list):
            return 400, {"error": "prompt must be a string"}
        return 200, {"choices": [{"text": body["prompt"].upper(), "finish_reason": "length"}]}

    with TinyServer(answer) as server:
        got = asyncio.run(generate(ServerEngine(server.url, "m", ByteTokenizer(), ids=True), list(b"abc"), stop=("x",)))
    assert (bytes(got.token_ids), got.finish_reason) == (b"ABC", "length")
    assert server.requests[-1][1]["stop"] == ["x"]


def test_a_busy_server_is_asked_again_and_a_refusal_is_said():
    statuses = iter([429, 503, 200])

    def answer(path, body):
        return next(statuses), {"choices": [{"text": "a", "finish_reason": "stop"}]}

    with TinyServer(answer) as server:
        got = asyncio.run(generate(ServerEngine(server.url, "m", ByteTokenizer()), [65]))
        assert list(got.token_ids) == [97, 257]
    with TinyServer(lambda path, body: (401, {"error": "no such key"})) as server:
        with pytest.raises(EngineError, match=r"401.*no such key"):
            asyncio.run(generate(ServerEngine(server.url, "m", ByteTokenizer()), [65]))
        assert len(server.requests) == 1
    with (
        TinyServer(lambda path, body: (200, {"choices": []})) as server,
        pytest.raises(EngineError, match="no choice"),
    ):
        asyncio.run(generate(ServerEngine(server.url, "m", ByteTokenizer()), [65]))
    with pytest.raises(EngineError, match="5 tries"):
        asyncio.run(generate(ServerEngine(server.url, "m", ByteTokenizer()), [65]))


def test_against_our_own_chat_server(monkeypatch):
    async def agent(executor, prompt, session_id):
        monkeypatch.setenv("OPENAI_API_KEY", executor.api_key)
        engine = ServerEngine(executor.session_url(session_id), "policy", ByteTokenizer())
        first = await generate(engine, [*prompt.encode()])
        ids = [*prompt.encode(), *first.token_ids, *b"more"]
        second = await generate(engine, ids)
        assert bytes(i for i in second.token_ids if i < 256) == b"two"
        return {"reward": 1.0}

    (t,), _ = run_chat(agent, ["one", "two"])
    assert t.failure is None, t.failure
    assert len(t.turns) == 2
