"""OpenAI's Responses over real HTTP, with the official client, unmodified; with state and without."""

import json

import openai
import pytest

from support.agents_chat import Direct, Reader, client, message, run, text_of
from support.agents_templates import PARTS, QWEN3

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TWO_TURNS = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
    "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
)


def test_state_by_the_id_of_the_previous_response():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            first = await api.responses.create(model="policy", input=prompt, instructions="Be brief.")
            assert (first.output_text, first.status, first.usage.output_tokens) == ("one", "completed", 4)
            second = await api.responses.create(
                model="policy", input="more", instructions="Be brief.", previous_response_id=first.id
            )
            assert second.output_text == "two"
            assert (await api.responses.retrieve(second.id)).output_text == "two"

    (t,), _ = run(agent, ["one", "two"])
    assert text_of(t) == TWO_TURNS
    assert (len(t.turns), sum(t.trainable)) == (2, 8)


def test_without_state():
    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            items = [message(prompt)]
            for text in ("more", None):
                answer = await api.responses.create(model="policy", input=items, instructions="Be brief.", store=False)
                items += [*answer.output, message(text)]
            with pytest.raises(openai.BadRequestError) as caught:
                await api.responses.create(model="policy", input="x", previous_response_id=answer.id)
            assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")

    (t,), _ = run(agent, ["one", "two"])
    assert text_of(t) == TWO_TURNS


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("state", ["stored", "content", "encrypted"])
def test_functions_and_reasoning_go_on_in_one_sample(streamed, state):
    async def ask(api, **changes):
        extra: dict = {"store": False} if state != "stored" else {}
        if state == "encrypted":
            extra["include"] = ["reasoning.encrypted_content"]
        body = {"model": "policy", "tools": [TOOL], **extra, **changes}
        if not streamed:
            return await api.responses.create(**body)
        async with api.responses.stream(**body) as stream:
            return await stream.get_final_response()

    async def agent(executor, prompt, session_id):
        async with client(executor, session_id) as api:
            first = await ask(api, input=prompt)
            reasoning, call = first.output
            assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hm")
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
            if state == "stored":
                second = await ask(api, input=[result], previous_response_id=first.id)
            else:
                items = [item.model_dump(exclude_none=True) for item in first.output]
                for item in items:
                    item.pop("parsed_arguments", None)
                if state == "encrypted":
                    items[0].pop("content")
                second = await ask(api, input=[message(prompt), *items, result])
            assert second.output_text == "it is 2"

    (t,), _ = run(agent, [CALL, "it is 2"], template=QWEN3)
    assert not t.failed, t.failure
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n2" in text_of(t)
    assert (len(t.turns), t.extra_logs["agent/template_breaks"]) == (2, 0.0)


def ask(direct, **changes):
    return direct.post({"model": "policy", "input": "hi", **changes}, f"/s/{direct.session_id}/v1/responses")


def test_events_in_their_order():
    with Direct(["yes " * 20], template=QWEN3) as direct:
        text = ask(direct, stream=True).text
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [d["sequence_number"] for d in data] == list(range(len(data)))
    assert [d["type"].removeprefix("response.") for d in data] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert data[-1]["response"]["output"][0]["content"][0]["text"] == "yes " * 20


def test_what_is_cut_is_incomplete_and_log_probs_are_shown():
    with Direct(["long"]) as direct:
        body = ask(direct, max_output_tokens=2, top_logprobs=2).json()
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        first, _ = body["output"][0]["content"][0]["logprobs"]
        assert (first["token"], [top["token"] for top in first["top_logprobs"]]) == ("l", ["l", "m"])


def test_references_formats_images():
    with Direct(["one", "two"], template=PARTS, image_reader=Reader()) as direct:
        image = {"type": "input_image", "image_url": "data:1", "detail": "auto"}
        question = {"role": "user", "content": [image, {"type": "input_text", "text": "?"}]}
        first = ask(direct, input=[question]).json()
        again = [question, {"type": "item_reference", "id": first["output"][0]["id"]}, message("more")]
        assert ask(direct, input=again).status_code == 200
        assert [len(branch.recorder.turns) for branch in direct.session.branches] == [2]
        schema = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
        ask(direct, text={"format": schema})
        form = json.loads(direct.scripted.requests[-1].sampling.structure)["format"]
        assert form["elements"][-1]["json_schema"] == {"type": "integer"}


WRONG = {
    "background": {"background": True},
    "truncation": {"truncation": "auto"},
    "conversation": {"conversation": "c"},
    "include": {"include": ["file_search_call.results"]},
    "input": {"input": 3},
    "input[0].type": {"input": [{"type": "computer_call"}]},
    "input[0].role": {"input": [{"role": "tool", "content": "x"}]},
    "input[0].call_id": {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
    "input[0].content[0]": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    "input[0].encrypted_content": {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "zzzz"}]},
    "input[0].id": {"input": [{"type": "item_reference", "id": "msg_0"}]},
    "tools[0].type": {"tools": [{"type": "web_search"}]},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}},
    "text.verbosity": {"text": {"verbosity": "low"}},
    "reasoning.effort": {"reasoning": {"effort": "low"}},
    "reasoning.summary": {"reasoning": {"summary": "detailed"}},
    "stream_options": {"stream_options": {"include_obfuscation": False}},
    "seed": {"seed": 3},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_done_is_refused_by_name(name):
    with Direct(["x"], template=QWEN3) as direct:
        reply = ask(direct, **WRONG[name])
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == name
        assert not direct.scripted.requests
        assert not direct.session.branches


def test_labels_of_the_client_change_nothing():
    with Direct(["x"], template=QWEN3) as direct:
        for labels in ({}, {"client_metadata": {"installation": "i"}, "metadata": {"a": "b"}, "prompt_cache_key": "k"}):
            assert ask(direct, **labels).status_code == 200
        assert direct.prompts[0] == direct.prompts[1]
