"""Anthropic's Messages over real HTTP, with the official client, unmodified."""

import asyncio
import json
from typing import Any

import anthropic
import pytest

from openrlhf.agents.chat.wires.conversation import seal
from support.agents_chat import Direct, Reader, message, run, text_of
from support.agents_templates import PARTS, QWEN3

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def variables(executor, session_id):
    """A client that knows what its environment says and nothing else."""
    values = executor.environment(session_id)
    return {"base_url": values["ANTHROPIC_BASE_URL"], "api_key": values["ANTHROPIC_API_KEY"], "max_retries": 0}


def test_two_turns_are_one_sample_token_by_token():
    async def agent(executor, prompt, session_id):
        async with anthropic.AsyncAnthropic(**variables(executor, session_id)) as api:
            messages: list[Any] = [message(prompt)]
            for text in ("more", None):
                reply = await api.messages.create(model="policy", max_tokens=100, system="Be brief.", messages=messages)
                assert (reply.type, reply.role, reply.stop_reason) == ("message", "assistant", "end_turn")
                assert reply.usage.output_tokens == 4
                assert (await api.models.retrieve("policy")).id == (await api.models.list()).data[0].id == "policy"
                counted = await api.messages.count_tokens(model="policy", system="Be brief.", messages=messages)
                assert counted.input_tokens == reply.usage.input_tokens
                messages += [{"role": "assistant", "content": reply.content}, message(text)]

    (t,), engine = run(agent, ["one", "two"])
    assert text_of(t) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert (len(t.turns), sum(t.trainable)) == (2, 8)
    assert len(engine.requests) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_and_thinking_go_on_in_one_sample(streamed):
    async def ask(api, messages):
        body = {"model": "policy", "max_tokens": 100, "messages": messages, "tools": [TOOL]}
        if not streamed:
            return await api.messages.create(**body)
        async with api.messages.stream(**body) as stream:
            return await stream.get_final_message()

    async def agent(executor, prompt, session_id):
        async with anthropic.AsyncAnthropic(**variables(executor, session_id)) as api:
            messages = [message(prompt)]
            reply = await ask(api, messages)
            assert [block.type for block in reply.content] == ["thinking", "tool_use"]
            thinking, call = reply.content
            assert (reply.stop_reason, thinking.thinking, call.name, call.input) == ("tool_use", "hm", "add", {"a": 1})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "2"}]}
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
            reply = await ask(api, messages)
            assert (reply.content[0].text, reply.stop_reason) == ("it is 2", "end_turn")
            assert reply.usage.output_tokens == 8

    samples, _ = run(agent, [CALL, "it is 2"], template=QWEN3)
    (t,) = samples
    assert not t.failed, t.failure
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n2" in text_of(t)
    assert (len(t.turns), t.extra_logs["agent/template_breaks"]) == (2, 0.0)


def test_events_in_their_order():
    with Direct([CALL], template=QWEN3) as direct:
        body = {"model": "policy", "max_tokens": 100, "messages": [message("hi")], "tools": [TOOL], "stream": True}
        text = direct.post(body, f"/s/{direct.session_id}/v1/messages").text
    events = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [d["type"] for d in data] == events
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [block[0], block[1], block[1], block[2]]
    assert events == ["message_start", *thinking, *block, "message_delta", "message_stop"]
    assert data[3]["delta"]["type"] == "signature_delta"
    assert data[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_synchronous_client_in_a_thread():
    async def agent(executor, prompt, session_id):
        def ask():
            body = {"model": "policy", "max_tokens": 9, "messages": [message(prompt)]}
            with anthropic.Anthropic(**variables(executor, session_id)) as api, api.messages.stream(**body) as stream:
                assert "".join(stream.text_stream) == "word " * 40

        await asyncio.to_thread(ask)

    (t,), _ = run(agent, ["word " * 40], client_sampling="run")
    assert (len(t.turns), sum(t.trainable)) == (1, 201)


def ask(direct, **changes):
    body = {"model": "policy", "max_tokens": 200, "messages": [message("hi")], **changes}
    return direct.post(body, f"/s/{direct.session_id}/v1/messages")


def test_stop_sequences_prefill_and_length():
    with Direct(["a#b", "long", "#"]) as direct:
        reply = ask(direct, stop_sequences=["#"]).json()
        assert (reply["content"][0]["text"], reply["stop_reason"], reply["stop_sequence"]) == (
            "a",
            "stop_sequence",
            "#",
        )
        reply = ask(direct, max_tokens=2).json()
        assert (reply["content"][0]["text"], reply["stop_reason"]) == ("lo", "max_tokens")
        ask(direct, messages=[message("hi"), message("It is ", "assistant")])
        assert direct.prompts[-1].endswith("assistant\nIt is ")


def test_images_of_messages_and_results():
    def image(data):
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    with Direct([CALL, "x"], template=PARTS, image_reader=Reader()) as direct:
        question = {"role": "user", "content": [image("A"), {"type": "text", "text": "?"}]}
        reply = ask(direct, messages=[question])
        body = {"model": "policy", "messages": [question]}
        counted = direct.post(body, f"/s/{direct.session_id}/v1/messages/count_tokens").json()
        full = len(direct.scripted.requests[0].token_ids) + 2  # the image has three tokens for its placeholder
        assert counted["input_tokens"] == reply.json()["usage"]["input_tokens"] == full
        assert direct.prompts[0].count("<|image|>") == 1
        (branch,) = direct.session.branches
        assert branch.recorder.images == [b"data:image/png;base64,A"]


WRONG = {
    "max_tokens": {"max_tokens": None},
    "container": {"container": "c"},
    "tools[0].type": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "tools[0].input_schema": {"tools": [{"name": "f"}]},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
    "tool_choice.type": {"tools": [TOOL], "tool_choice": {"type": "each"}},
    "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": 10}},
    "messages[0].content[0]": {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    "messages[0].content[0].tool_use_id": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "1"}]}]
    },
    "messages[1].content[0].signature": {
        "messages": [
            message("hi"),
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "mine", "signature": "forged"}]},
            message("more"),
        ]
    },
    "messages[0].role": {"messages": [{"role": "tool", "content": "x"}]},
    "output_config.effort": {"output_config": {"effort": "low"}},
    "context_management": {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
    "output_config.format": {"output_config": {"format": {"type": "text"}}},
    "temperature": {"temperature": 1.5},
    "seed": {"seed": 3},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_done_is_refused_by_name(name):
    with Direct(["x"], template=QWEN3) as direct:
        reply = ask(direct, **WRONG[name])
        assert reply.status_code == 400, reply.text
        body = reply.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert name.rpartition(".")[2] in body["error"]["message"]
        assert not direct.scripted.requests
        assert not direct.session.branches


def test_what_asks_for_nothing_is_no_reason_to_refuse():
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    knowing = QWEN3 + "{# {{ reasoning_effort }} #}{{ reasoning_effort or '' }}"
    for template, written in ((QWEN3, ""), (knowing, "high")):
        with Direct(["x"], template=template) as direct:
            assert ask(direct).status_code == 200
            reply = ask(direct, context_management=keep, output_config={"effort": "high"})
            assert reply.status_code == 200, reply.text
            assert direct.prompts[1] == direct.prompts[0] + written


def test_errors_in_the_form_of_the_api():
    with Direct(["x"]) as direct:
        unknown = direct.post({}, "/v1/messages/batches")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        unknown = direct.post({}, "/s/none/v1/messages")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def test_required_calls_and_formats_constrain_the_engine():
    with Direct([CALL], template=QWEN3) as direct:
        ask(direct, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
        form = json.loads(direct.scripted.requests[0].sampling.structure)["format"]
        assert form["elements"][-1]["stop_after_first"] is True
        ask(direct, output_config={"format": {"type": "json_schema", "schema": {"type": "integer"}}})
        form = json.loads(direct.scripted.requests[1].sampling.structure)["format"]
        assert form["elements"][-1] == {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.mark.parametrize("kept", ["sent back", "dropped"])
def test_thinking_that_the_client_drops_goes_on_where_the_template_keeps_it(kept):
    with Direct([CALL, "done"], template=QWEN3) as direct:
        reply = ask(direct, tools=[TOOL]).json()
        content = [block for block in reply["content"] if kept == "sent back" or block["type"] != "thinking"]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "2"}
        history = [message("hi"), {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        assert ask(direct, tools=[TOOL], messages=history).status_code == 200
        assert [len(branch.recorder.turns) for branch in direct.session.branches] == [2]
        # behind the next question the template drops it: another sample
        history += [message("done", "assistant"), message("and then?")]
        assert ask(direct, tools=[TOOL], messages=history).status_code == 200
        assert [len(branch.recorder.turns) for branch in direct.session.branches] == [2, 1]
        assert direct.session.template_breaks == 1


def test_thinking_that_was_edited_is_another_history():
    with Direct([CALL, "done"], template=QWEN3) as direct:
        reply = ask(direct, tools=[TOOL]).json()
        reply["content"][0] |= {"thinking": "other", "signature": seal("other")}
        result = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": "2"}
        history = [
            message("hi"),
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [result]},
        ]
        assert ask(direct, tools=[TOOL], messages=history).status_code == 200
        assert len(direct.session.branches) == 2
        assert "<think>\nother\n</think>" in direct.prompts[-1]
