"""Every field of a chat completion request: done, or refused by name (S01)."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from openai.types.chat import completion_create_params

from openrlhf.agents.chat.fields import HONOURED, LABELS, REFUSED
from support.agents_chat import Direct, chat_body, message
from support.agents_templates import QWEN3
from support.launcher_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}{% if mood %}({{ mood }}){% endif %}"
    "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + QWEN3
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASK = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "a#b<|pad|>c"

# What a request with the field does: its body, and the check of (the engine's request, the answer, the prompt).
DONE = {
    "messages": ({"messages": [message("you")]}, lambda r, a, p: "you" in p),
    "model": ({"model": "policy"}, lambda r, a, p: a["model"] == "policy"),
    "session_id": ({}, lambda r, a, p: r is not None),  # its own test is below
    "request_id": ({"request_id": "abc"}, lambda r, a, p: a["id"] == "chatcmpl-abc"),
    "temperature": ({"temperature": 0.5}, lambda r, a, p: r.sampling.temperature == 0.5),
    "top_p": ({"top_p": 0.5}, lambda r, a, p: r.sampling.top_p == 0.5),
    "top_k": ({"top_k": 5}, lambda r, a, p: r.sampling.top_k == 5),
    "min_p": ({"min_p": 0.25}, lambda r, a, p: r.sampling.min_p == 0.25),
    "presence_penalty": ({"presence_penalty": -1}, lambda r, a, p: r.sampling.presence_penalty == -1.0),
    "frequency_penalty": ({"frequency_penalty": 2}, lambda r, a, p: r.sampling.frequency_penalty == 2.0),
    "repetition_penalty": ({"repetition_penalty": 1.5}, lambda r, a, p: r.sampling.repetition_penalty == 1.5),
    "seed": ({"seed": 7}, lambda r, a, p: r.sampling.seed == 7),
    "max_tokens": ({"max_tokens": 2}, lambda r, a, p: text(a) == "a#"),
    "max_completion_tokens": ({"max_completion_tokens": 1}, lambda r, a, p: text(a) == "a"),
    "min_tokens": ({"min_tokens": 2}, lambda r, a, p: r.sampling.min_tokens == 2),
    "stop": ({"stop": "#"}, lambda r, a, p: (r.sampling.stop, text(a)) == (("#",), "a")),
    "stop_token_ids": ({"stop_token_ids": [98]}, lambda r, a, p: r.sampling.stop_token_ids == (98,)),
    "include_stop_str_in_output": (
        {"stop": "#", "include_stop_str_in_output": True},
        lambda r, a, p: (text(a), a["choices"][0]["stop_reason"]) == ("a#", "#"),
    ),
    "ignore_eos": ({"ignore_eos": True}, lambda r, a, p: r.sampling.ignore_eos is True),
    "n": ({"n": 2}, lambda r, a, p: len(a["choices"]) == 2),
    "stream": ({"stream": True}, lambda r, a, p: a[-1]["choices"][0]["finish_reason"] == "stop"),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda r, a, p: a[-1]["usage"]["completion_tokens"] == 6,
    ),
    "logprobs": ({"logprobs": True}, lambda r, a, p: len(a["choices"][0]["logprobs"]["content"]) == 6),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda r, a, p: (
            [top["token"] for top in a["choices"][0]["logprobs"]["content"][0]["top_logprobs"]] == ["a", "b"]
        ),
    ),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
        lambda r, a, p: {"type": "json_schema", "json_schema": {"type": "array"}} in elements(r),
    ),
    "parallel_tool_calls": (
        {"tools": [TOOL], "parallel_tool_calls": False},
        lambda r, a, p: elements(r)[-1]["elements"][1]["content"]["stop_after_first"] is True,
    ),
    "tools": ({"tools": [TOOL]}, lambda r, a, p: '"name": "add"' in p),
    "tool_choice": ({"tools": [TOOL], "tool_choice": "none"}, lambda r, a, p: "add" not in p),
    "chat_template_kwargs": ({"chat_template_kwargs": {"mood": "calm"}}, lambda r, a, p: p == f"(calm){ASK}"),
    "documents": ({"documents": [{"title": "t", "text": "doc"}]}, lambda r, a, p: p == f"[doc]{ASK}"),
    "reasoning_effort": ({"reasoning_effort": "low"}, lambda r, a, p: p == f"<low>{ASK}"),
    "add_generation_prompt": ({"add_generation_prompt": False}, lambda r, a, p: p.endswith("hi<|im_end|>\n")),
    "continue_final_message": (
        {"messages": [message("hi"), message("It is ", "assistant")], "continue_final_message": True},
        lambda r, a, p: p == f"{ASK}It is ",
    ),
    "skip_special_tokens": ({"skip_special_tokens": True}, lambda r, a, p: text(a) == "a#bc"),
    "return_token_ids": ({"return_token_ids": True}, lambda r, a, p: a["prompt_token_ids"] == r.token_ids),
    "return_tokens_as_token_ids": (
        {"logprobs": True, "return_tokens_as_token_ids": True},
        lambda r, a, p: a["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97",
    ),
    "return_prompt_text": ({"return_prompt_text": True}, lambda r, a, p: a["prompt_text"] == p == ASK),
}
GIVEN = {  # values that are not neutral; True where any will do
    "logit_bias": {"1": 5}, "bad_words": ["x"], "allowed_token_ids": [1], "thinking_token_budget": 5,
    "structured_outputs": {"regex": "a"}, "guided_json": {"type": "object"}, "guided_choice": ["a"],
    "functions": [{"name": "f"}], "function_call": "auto", "modalities": ["audio"],
    "verbosity": "low", "service_tier": "flex", "prompt_logprobs": 1, "logprob_token_ids": [1],
    "best_of": 2, "length_penalty": 0.5, "include_reasoning": False, "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5, "mm_payload": "none", "return_mm_kwargs": False, "priority": 1,
    "routed_experts_prompt_start": 1, "stream_interval": 2, "chat_template": "{{ messages }}",
}  # fmt: skip


def elements(request):
    """What the engine was told to constrain the answer to."""
    return json.loads(request.sampling.structure)["format"]["elements"]


def text(answer):
    return answer["choices"][0]["message"]["content"]


@pytest.fixture
def direct():
    with Direct([ANSWER], template=TEMPLATE) as direct:
        yield direct


def error_of(reply):
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_s01_honoured(name, direct):
    changes, check = DONE[name]
    reply = direct.post(chat_body(**changes))
    assert reply.status_code == 200, reply.text
    if changes.get("stream"):
        answer = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    else:
        answer = reply.json()
    assert check(direct.scripted.requests[0], answer, direct.prompts[0])


@pytest.mark.parametrize("name", [
    "tools", "documents", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
])  # fmt: skip
def test_s01_honoured_with_a_real_tokenizer(name):
    changes, check = DONE[name]
    with Direct(["x"], tokenizer=byte_tokenizer(chat_template=TEMPLATE)) as direct:
        reply = direct.post(chat_body(**changes))
        assert reply.status_code == 200, reply.text
        assert check(direct.scripted.requests[0], reply.json(), direct.prompts[0])
        assert direct.post(chat_body(chat_template_kwargs={"return_dict": True})).status_code == 400


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_s01_refused_by_name(name, direct):
    neutral, reason = REFUSED[name]
    error = error_of(direct.post(chat_body(**{name: GIVEN.get(name, True not in neutral)})))
    assert error["param"] == name
    assert error["message"].startswith(f"{name!r} is not supported: {reason}; got ")
    assert not direct.scripted.requests
    for value in (None, *neutral):
        assert direct.post(chat_body(**{name: value})).status_code == 200


@pytest.mark.parametrize("name", sorted(LABELS))
def test_s01_labels_change_nothing(name, direct):
    first, second = (direct.post(body).json()["token_ids"] for body in (chat_body(), chat_body(**{name: "x"})))
    assert first == second


@pytest.mark.parametrize("name", sorted(HONOURED - {"messages", "model"}))
def test_s01_null_is_the_default(name, direct):
    assert direct.post(chat_body(**{name: None})).status_code == 200


@pytest.mark.parametrize("name", sorted(HONOURED - {"session_id"}))
def test_s01_a_wrong_type_is_named(name, direct):
    wrong = 7 if name in ("request_id", "messages", "model", "stop") else "\x00"
    changes = {"stream": True} if name == "stream_options" else {}
    assert error_of(direct.post(chat_body(**changes, **{name: wrong})))["param"] == name


def test_s01_unknown_fields_are_named_with_a_guess(direct):
    error = error_of(direct.post(chat_body(max_token=5)))
    assert (error["param"], error["code"]) == ("max_token", "unknown_field")
    assert error["message"] == "unknown field 'max_token': it would be ignored; did you mean 'max_tokens'?"
    assert "did you mean" not in error_of(direct.post(chat_body(qqqqq=5)))["message"]


NESTED = {
    "stream_options.continuous_usage_stats": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    "stream_options.usage": {"stream": True, "stream_options": {"usage": True}},
    "stream_options": {"stream_options": {"include_usage": True}},
    "chat_template_kwargs.enable_thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "chat_template_kwargs.tokenize": {"chat_template_kwargs": {"tokenize": True}},
    "chat_template_kwargs.return_dict": {"chat_template_kwargs": {"return_dict": True}},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    "top_logprobs": {"top_logprobs": 2},
    "tools[1]": {"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]},
    "tools[0].function.parameters": {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
    "tools[0].function.strict": {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": True},
    "min_tokens": {"min_tokens": 5, "max_tokens": 4},
    "top_p": {"top_p": 0},
    "temperature": {"temperature": 2.5},
    "stop_token_ids": {"stop_token_ids": [268]},
    "session_id": {"session_id": "another"},
    "messages[0].function_call": {"messages": [{**message("x", "assistant"), "function_call": {"name": "f"}}]},
    "messages[0].content[0]": {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
    "messages[0].tool_calls": {"messages": [{**message("x"), "tool_calls": [{"function": {"name": "f"}}]}]},
}


@pytest.mark.parametrize("param", NESTED)
def test_s01_what_is_inside_a_field(param, direct):
    assert error_of(direct.post(chat_body(**NESTED[param])))["param"] == param
    assert not direct.scripted.requests


CONSTRAINED = {
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
}


@pytest.mark.parametrize("param", CONSTRAINED)
def test_an_engine_that_constrains_nothing_refuses_by_name(param):
    with Direct(["x"], template=TEMPLATE, guided=False) as direct:
        name = "tool_choice" if param == "parallel_tool_calls" else param
        assert error_of(direct.post(chat_body(**CONSTRAINED[param])))["param"] == name
        assert not direct.scripted.requests


def test_calls_that_must_come():
    tools = [TOOL, {"type": "function", "function": {"name": "sub"}}]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    with Direct([call], template=TEMPLATE) as direct:
        for choice, names in (
            ("required", ["add", "sub"]),
            ({"type": "function", "function": {"name": "add"}}, ["add"]),
        ):
            reply = direct.post(chat_body(tools=tools, tool_choice=choice)).json()["choices"][0]
            assert (reply["finish_reason"], reply["message"]["tool_calls"][0]["function"]["name"]) == (
                "tool_calls",
                "add",
            )
            form = elements(direct.scripted.requests[-1])[-1]
            assert [json.loads(tag["begin"].partition("\n")[2] + '""}')["name"] for tag in form["tags"]] == names
            assert (form["at_least_one"], form["stop_after_first"]) == (True, names == ["add"])


@pytest.mark.parametrize("name", ["tools", "documents", "reasoning_effort"])
def test_s01_what_the_template_would_leave_out_is_refused(name):
    with Direct(["x"]) as direct:
        error = error_of(direct.post(chat_body(**DONE[name][0])))
    assert error["param"] == name
    assert "the policy's chat template" in error["message"]


def test_s01_min_tokens_that_do_not_fit_the_context():
    with Direct(["x"], max_length=60) as direct:
        room = 60 - direct.post(chat_body()).json()["usage"]["prompt_tokens"]
        assert error_of(direct.post(chat_body(min_tokens=room + 1)))["param"] == "min_tokens"
        assert direct.post(chat_body(min_tokens=room)).status_code == 200


def test_s01_a_stop_string_within_min_tokens_stops_nothing(direct):
    direct.scripted.script = ["a#b#"]
    choice = direct.post(chat_body(stop="#", min_tokens=2)).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("a#b", "#")


def test_s01_a_stop_token_is_cut_and_named(direct):
    direct.scripted.script = [[97, 98]]
    choice = direct.post(chat_body(stop_token_ids=[98])).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"], choice["token_ids"]) == ("a", 98, [97, 98])


def test_s01_a_continued_message_is_one_message_of_the_history(direct):
    direct.scripted.script = ["42.", "Yes."]
    opened = [message("hi"), message("It is ", "assistant")]
    reply = direct.say(opened, continue_final_message=True)
    assert reply["content"] == "42."
    direct.say([message("hi"), message("It is 42.", "assistant"), message("Sure?")])
    (branch,) = direct.session.branches
    assert direct.texts == [
        f"{ASK}It is 42.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    ]
    assert [direct.tokenizer.decode(branch.recorder.token_ids[t.start : t.end]) for t in branch.recorder.turns] == [
        "42.<|im_end|>",
        "Yes.<|im_end|>",
    ]
    assert direct.session.template_breaks == 0


def test_s01_the_session_in_the_body(direct):
    path = "/v1/chat/completions"
    assert direct.post(chat_body(session_id=direct.session_id), path).status_code == 200
    assert direct.post(chat_body(session_id=direct.session_id)).status_code == 200
    assert direct.post(chat_body(), path).status_code == 404


def test_s01_every_field_of_openai_is_decided():
    parameters = completion_create_params
    known = set()
    for part in ("CompletionCreateParamsBase", "CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"):
        known |= set(getattr(parameters, part).__annotations__)
    assert "reasoning_effort" in known
    assert sorted(known - {*HONOURED, *LABELS, *REFUSED}) == []


def test_s01_every_field_of_vllm_is_decided():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    path = Path(spec.origin).parent / "entrypoints" / "openai" / "chat_completion" / "protocol.py"
    classes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
    (request,) = (c for c in classes if c.name == "ChatCompletionRequest")
    known = {s.target.id for s in request.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    assert "truncate_prompt_tokens" in known
    assert sorted(name for name in known - {*HONOURED, *LABELS, *REFUSED} if not name.startswith("_")) == []


def test_s01_no_field_is_decided_twice():
    assert not HONOURED & LABELS
    assert not (HONOURED | LABELS) & set(REFUSED)
    assert set(DONE) == HONOURED


TOKENIZE = {
    "messages": ({"messages": [message("hi")]}, ASK),
    "no prompt": ({"messages": [message("hi")], "add_generation_prompt": False}, "<|im_start|>user\nhi<|im_end|>\n"),
    "continued": ({"messages": [message("hi")], "continue_final_message": True}, "<|im_start|>user\nhi"),
    "variables": ({"messages": [message("hi")], "chat_template_kwargs": {"mood": "sad"}}, f"(sad){ASK}"),
    "prompt": ({"prompt": "ab", "model": "policy"}, "ab"),
}


@pytest.mark.parametrize("name", TOKENIZE)
def test_s01_tokenize(name, direct):
    body, expected = TOKENIZE[name]
    reply = direct.post({**body, "return_token_strs": True}, f"/s/{direct.session_id}/tokenize").json()
    assert direct.tokenizer.decode(reply["tokens"]) == "".join(reply["token_strs"]) == expected


@pytest.mark.parametrize(
    ("body", "param"), [([1], None), ({}, "prompt"), ({"prompt": "a", "temperature": 1}, "temperature")]
)
def test_s01_tokenize_refuses(body, param, direct):
    assert error_of(direct.post(body, f"/s/{direct.session_id}/tokenize"))["param"] == param
