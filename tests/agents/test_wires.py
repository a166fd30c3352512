"""What all wire formats have in common: faults, sessions, whose sampling counts, and the fields of official clients."""

import json
import logging
from typing import Any

import httpx
import openai
import pytest
from anthropic.types import message_create_params
from openai.types.responses import response_create_params

from openrlhf.agents import failures
from openrlhf.agents.chat.wires import anthropic, responses
from openrlhf.agents.engine import SamplingParams
from support.agents_chat import Direct, chat_body, message, run
from support.agents_templates import QWEN3

PATHS = {
    "chat": ("chat/completions", chat_body(max_completion_tokens=3, temperature=0.25, top_p=0.5)),
    "messages": ("messages", chat_body(max_tokens=3, temperature=0.25, top_p=0.5)),
    "responses": (
        "responses",
        {"model": "policy", "input": "hi", "max_output_tokens": 3, "temperature": 0.25, "top_p": 0.5},
    ),
}


def test_half_an_emoji_in_the_arguments_of_a_call():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add"}}]
    with Direct([call, "done"], template=QWEN3) as direct:
        reply = direct.say([message("hi")], tools=tools)
        assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {"a": "\ufffd"}
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "2"}
        direct.say([message("hi"), reply, result], tools=tools)
        (branch,) = direct.session.branches
        assert "\\ud83d" in direct.texts[0]  # as it was sampled
        assert len(branch.recorder.turns) == 2


@pytest.mark.parametrize("wire", PATHS)
def test_the_run_decides_how_it_samples(wire, caplog, monkeypatch):
    monkeypatch.setattr(failures, "_said", set())
    path, body = PATHS[wire]
    with Direct(["a long answer"], client_sampling="run") as direct, caplog.at_level(logging.WARNING):
        assert direct.post(body, f"/s/{direct.session_id}/v1/{path}").status_code == 200
        sampling = direct.scripted.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, len(direct.texts[0]) > 20) == (1.0, 1.0, True)
    (record,) = [record for record in caplog.records if "a client asks for" in record.getMessage()]
    assert "temperature 0.25, top_p 0.5" in record.getMessage()


@pytest.mark.parametrize("wire", PATHS)
def test_the_client_decides_where_it_is_honoured(wire):
    path, body = PATHS[wire]
    with Direct(["a long answer"], client_sampling="honour") as direct:
        assert direct.post(body, f"/s/{direct.session_id}/v1/{path}").status_code == 200
        sampling = direct.scripted.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.5, 3)


def test_the_temperature_of_a_client_is_told_with_its_turn():
    with Direct(["one", "two"], client_sampling="honour") as direct:
        direct.session.sampling = SamplingParams(temperature=0.5)
        history = [message("hi")]
        history += [direct.say(history, temperature=2.0), message("more")]
        history += [direct.say(history, temperature=0.0), message("more")]
        direct.say(history, temperature=0.5)
        (branch,) = direct.session.branches
        assert [turn.temperature for turn in branch.recorder.turns] == [2.0, None, None]
        assert [request.sampling.temperature for request in direct.scripted.requests] == [2.0, 0.5, 0.5]


def test_reasoning_apart_in_chat_completions_comes_back_apart():
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add"}}]
    with Direct([call, "done"], template=QWEN3) as direct:
        direct.session.separate = True
        reply = direct.say([message("hi")], tools=tools)
        assert (reply["reasoning"], reply["content"]) == ("hm", None)
        history = [message("hi"), reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "2"}]
        direct.say(history, tools=tools)
        assert [len(branch.recorder.turns) for branch in direct.session.branches] == [2]
        other = {"role": "assistant", "content": "yes", "reasoning_content": "a thought of somebody else"}
        direct.say([message("hi"), other, message("more")], tools=tools)
        assert len(direct.session.branches) == 2


@pytest.mark.parametrize("way", ["path", "key", "header", "x-api-key"])
def test_whose_sample_a_request_is(way):
    with Direct(["x"]) as direct:
        server, session = direct.server, direct.session_id
        key = server.session_key(session) if "key" in way else server.token
        headers = {"x-api-key": key} if way == "x-api-key" else {"Authorization": f"Bearer {key}"}
        headers |= {"X-Session-Id": session} if way == "header" else {}
        path = f"/s/{session}/v1/chat/completions" if way == "path" else "/v1/chat/completions"

        async def send():
            transport = httpx.ASGITransport(direct.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://direct", trust_env=False) as http:
                return await http.post(path, json=chat_body(), headers=headers)

        assert direct.loop.run(send()).status_code == 200
        assert len(direct.session.branches) == 1


def test_a_key_of_one_session_opens_no_other():
    with Direct(["x"]) as direct:
        other = direct.server.add(direct.session)
        direct.server.token, key = "t", "t"
        reply = direct.post(chat_body(), f"/s/{other}/v1/chat/completions")
        assert reply.status_code == 200
        assert key == direct.server.token

        async def send():
            transport = httpx.ASGITransport(direct.app)
            headers = {"Authorization": f"Bearer {direct.server.session_key(direct.session_id)}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://direct", trust_env=False) as http:
                return await http.post(f"/s/{other}/v1/chat/completions", json=chat_body(), headers=headers)

        assert direct.loop.run(send()).status_code == 400


@pytest.mark.parametrize(("header", "status"), [("ses_of_the_client", 200), ("other", 400)])
def test_a_header_that_names_no_session_of_ours_is_the_clients_own(header, status):
    with Direct(["x"]) as direct:
        direct.server.sessions["other"] = direct.session
        own = {"Authorization": f"Bearer {direct.server.token}", "X-Session-Id": header}

        async def send(path, **headers):
            transport = httpx.ASGITransport(direct.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://direct", trust_env=False) as http:
                return await http.post(path, json=chat_body(), headers={**own, **headers})

        key = f"Bearer {direct.server.session_key(direct.session_id)}"
        path = "/v1/chat/completions"
        assert direct.loop.run(send(f"/s/{direct.session_id}{path}")).status_code == status
        assert direct.loop.run(send(path, Authorization=key)).status_code == status
        assert direct.loop.run(send(path)).status_code == (404 if status == 200 else 200)


def test_a_malformed_call_is_seen_by_the_agent_and_in_the_trace():
    draft = "<tool_call>{bad}</tool_call>"
    tools: Any = [{"type": "function", "function": {"name": "add"}}]

    async def agent(executor, prompt, session_id):
        async with openai.AsyncOpenAI(**_variables(executor, session_id)) as official:
            api: Any = official
            answer = await api.chat.completions.create(model="policy", messages=[message(prompt)], tools=tools)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == (draft, "stop")
        assert choice.model_extra["malformed_tool_calls"] == [draft]

    (t,), _ = run(agent, [draft], template=QWEN3)
    assert t.extra_logs["agent/malformed_tool_calls"] == 1.0


def _variables(executor, session_id):
    values = executor.environment(session_id)
    return {"base_url": values["OPENAI_BASE_URL"], "api_key": values["OPENAI_API_KEY"], "max_retries": 0}


@pytest.mark.parametrize(
    ("module", "parameters", "prefix"),
    [
        (anthropic, message_create_params, "MessageCreateParams"),
        (responses, response_create_params, "ResponseCreateParams"),
    ],
)
def test_every_field_of_the_official_clients_is_decided(module, parameters, prefix):
    known = set()
    for part in ("Base", "NonStreaming", "Streaming"):
        known |= set(getattr(parameters, f"{prefix}{part}").__annotations__)
    assert "model" in known
    assert sorted(known - {*module.HONOURED, *module.LABELS, *module.REFUSED}) == []
    assert not (module.HONOURED | module.LABELS) & set(module.REFUSED)


def test_tokenised_tokens_of_128_turns():
    for wire, (path, body) in PATHS.items():
        with Direct(["answer "] * 200, client_sampling="run", max_length=100_000) as direct:
            history, before = [], None
            direct.tokenizer.encoded = 0
            for turn in range(128):
                history.append(message(f"question {turn}"))
                changes = {"input": list(history)} if wire == "responses" else {"messages": list(history)}
                if wire == "responses" and turn % 2:  # with state and without, in turns
                    changes = {"input": [history[-1]], "previous_response_id": before}
                reply = direct.post({**body, **changes}, f"/s/{direct.session_id}/v1/{path}")
                assert reply.status_code == 200, reply.text
                before = reply.json()["id"]
                history.append(message("answer ", "assistant"))
            (branch,) = direct.session.branches
            new = len(branch.recorder) - sum(branch.recorder.trainable)
            scripted = sum(branch.recorder.trainable)  # the engine of the test writes its answers with it, without EOS
            assert direct.tokenizer.encoded - (scripted - 128) <= 1.05 * new, wire


def test_the_sampling_of_the_run_stays():
    with Direct(["x"], client_sampling="run") as direct:
        direct.session.sampling = SamplingParams(temperature=0.5, stop=("!",))
        direct.say([message("hi")], stop="#", seed=5)
        sampling = direct.scripted.requests[0].sampling
        assert (sampling.temperature, sampling.stop, sampling.seed) == (0.5, ("!", "#"), None)
