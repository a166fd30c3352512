"""Which tokens a request goes on from, for all wire formats: sub-agents, compaction, retries, streams that are left."""

import asyncio
import json

import httpx
import pytest

from support.agents_chat import Direct, message
from support.agents_templates import QWEN3

PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


@pytest.fixture(params=PATHS)
def wire(request):
    return request.param


def body_of(wire, history, system="", **changes):
    """The same conversation in each format."""
    if wire == "chat":
        head = [message(system, "system")] if system else []
        return {"model": "policy", "messages": [*head, *history], **changes}
    if wire == "messages":
        head = {"max_tokens": 99, **({"system": system} if system else {})}
        return {"model": "policy", **head, "messages": history, **changes}
    return {"model": "policy", "input": history, **({"instructions": system} if system else {}), **changes}


def said(wire, body):
    """The text of an answer."""
    if wire == "chat":
        return body["choices"][0]["message"]["content"]
    return body["content"][0]["text"] if wire == "messages" else body["output"][-1]["content"][0]["text"]


def ask(direct, wire, history, system="", **changes):
    """Asks, and adds the answer to the history."""
    reply = direct.post(body_of(wire, history, system, **changes), f"/s/{direct.session_id}/v1/{PATHS[wire]}")
    assert reply.status_code == 200, reply.text
    history.append(message(said(wire, reply.json()), "assistant"))


def turns(direct):
    return [len(branch.recorder.turns) for branch in direct.session.branches]


def test_sub_agents_are_conversations_of_their_own(wire):
    with Direct(["a1", "b1", "b2", "a2"]) as direct:
        main, sub = [message("task")], [message("part")]
        ask(direct, wire, main, "You lead.")
        ask(direct, wire, sub, "You search.")
        sub.append(message("more"))
        ask(direct, wire, sub, "You search.")
        main.append(message("it found b2"))
        ask(direct, wire, main, "You lead.")
        assert turns(direct) == [2, 2]
        assert direct.session.template_breaks == 0
        assert ["You search." in text for text in direct.texts] == [False, True]


def test_compaction_is_a_new_branch_and_goes_on(wire):
    with Direct(["a1", "a2", "summary", "a3", "a4"]) as direct:
        history = [message("task")]
        ask(direct, wire, history)
        history.append(message("go on"))
        ask(direct, wire, history)
        compact = [*history, message("Summarise.")]
        ask(direct, wire, compact)
        fresh = [message("So far: summary. Go on.")]
        ask(direct, wire, fresh)
        fresh.append(message("and on"))
        ask(direct, wire, fresh)
        assert turns(direct) == [3, 2]
        assert direct.session.template_breaks == 0


def test_a_retry_is_a_branch_and_the_one_that_the_client_keeps_goes_on(wire):
    with Direct(["first", "second", "third"]) as direct:
        history = [message("task")]
        ask(direct, wire, history.copy())
        ask(direct, wire, history)
        history.append(message("more"))
        ask(direct, wire, history)
        assert turns(direct) == [1, 2]
        assert "second" in direct.texts[1]


def test_every_history_and_its_changes(wire):
    """A client goes on from any earlier state; what was sampled is trained once."""
    with Direct([f"answer {i}" for i in range(6)]) as direct:
        history = [message("0")]
        ask(direct, wire, history)
        history.append(message("1"))
        ask(direct, wire, history)
        ask(direct, wire, [*history[:2], message("other")])
        ask(direct, wire, [message("edited"), *history[1:], message("2")])
        history.append(message("2"))
        ask(direct, wire, history)
        assert turns(direct) == [3, 1, 1]
        sampled = sum(sum(branch.recorder.trainable) for branch in direct.session.branches)
        assert sampled == 5 * (len("answer 0") + 1)


@pytest.mark.parametrize("events", [0, 2])
def test_a_stream_that_is_left_is_not_recorded(wire, events):
    with Direct(["word " * 100, "again"]) as direct:
        path = f"/s/{direct.session_id}/v1/{PATHS[wire]}"
        direct.loop.run(leave(direct, path, body_of(wire, [message("task")], stream=True), events))
        assert not direct.session.branches
        history = [message("task")]
        ask(direct, wire, history)
        assert turns(direct) == [1]


async def leave(direct, path, body, events):
    """A client that goes away after some events, as an ASGI server tells it."""
    sent, gone = [], asyncio.Event()

    async def receive():
        if not sent and not received:
            received.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(event):
        sent.append(event)
        if len(sent) > events:
            gone.set()
            await asyncio.sleep(0.05)

    received = []
    headers = [(b"authorization", f"Bearer {direct.server.token}".encode())]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("x", 1),
        "asgi": {"version": "3.0", "spec_version": "2.1"},
    }  # fmt: skip
    await direct.app(scope, receive, send)


def test_reasoning_in_all_formats_goes_on_in_a_tool_loop_and_branches_after_it(wire):
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    schema = {"type": "object", "properties": {}}
    tool = {
        "chat": {"type": "function", "function": {"name": "add", "parameters": schema}},
        "messages": {"name": "add", "input_schema": schema},
        "responses": {"type": "function", "name": "add", "parameters": schema},
    }[wire]
    with Direct([call, "<think>\nso\n</think>\n\nit is 2", "bye"], template=QWEN3) as direct:
        path = f"/s/{direct.session_id}/v1/{PATHS[wire]}"
        history = [message("1+1?")]
        first = direct.post(body_of(wire, history, tools=[tool]), path).json()
        history += answered(wire, first)
        second = direct.post(body_of(wire, history, tools=[tool]), path).json()
        assert turns(direct) == [2]
        history += spoken(wire, second)
        history.append(message("and then?"))
        assert direct.post(body_of(wire, history, tools=[tool]), path).status_code == 200
        assert (turns(direct), direct.session.template_breaks) == ([2, 1], 1)


def answered(wire, body):
    """The answer as a client sends it back, with the result of its tool call."""
    if wire == "chat":
        reply = body["choices"][0]["message"]
        return [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "2"}]
    if wire == "messages":
        result = {"type": "tool_result", "tool_use_id": body["content"][-1]["id"], "content": "2"}
        return [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]
    return [*body["output"], {"type": "function_call_output", "call_id": body["output"][-1]["call_id"], "output": "2"}]


def spoken(wire, body):
    if wire == "chat":
        return [body["choices"][0]["message"]]
    return [{"role": "assistant", "content": body["content"]}] if wire == "messages" else body["output"]


def test_two_requests_at_once_are_two_branches(wire):
    with Direct(["a", "b"]) as direct:
        path = f"/s/{direct.session_id}/v1/{PATHS[wire]}"

        async def both():
            return await asyncio.gather(*(direct.send(body_of(wire, [message("x")]), path) for _ in range(2)))

        replies: list[httpx.Response] = direct.loop.run(both())
        assert sorted(said(wire, reply.json()) for reply in replies) == ["a", "b"]
        assert turns(direct) == [1, 1]
