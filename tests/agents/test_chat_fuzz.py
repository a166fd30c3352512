"""Whatever a client sends: an answer or a 4xx, never a 5xx, and nothing of a refused request is recorded."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrlhf.agents.chat.fields import HONOURED, LABELS, REFUSED
from support.agents_chat import Direct, chat_body
from support.agents_templates import CHATML, LLAMA3, MISTRAL, PARTS, QWEN3
from support.launcher_tokenizer import CHATML as HF_CHATML
from support.launcher_tokenizer import byte_tokenizer

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.sampled_from(["auto", "text", "function", "<think>", "<tool_call>", "\ud800", "policy", "low", "\x00", "<s>"]),
)  # fmt: skip
KEYS = st.sampled_from(
    ["type", "text", "name", "content", "role", "function", "include_usage", "url", "parameters", "id"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": VALUES, "arguments": VALUES})}), max_size=2
)
PARTS_OF_CONTENT = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("text"), "text": SCALARS}),
        st.fixed_dictionaries({"type": st.just("image_url"), "image_url": VALUES}),
        VALUES,
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "x"])},
        optional={
            "content": st.text(max_size=5) | PARTS_OF_CONTENT | VALUES, "tool_calls": CALLS | VALUES, "name": SCALARS,
            "tool_call_id": SCALARS, "reasoning_content": SCALARS, "reasoning": SCALARS, "more": VALUES,
        },
    ),
    max_size=4,
)  # fmt: skip
TOOLS = st.lists(
    st.fixed_dictionaries({
        "type": st.sampled_from(["function", "custom"]),
        "function": st.fixed_dictionaries({"name": SCALARS}, optional={"parameters": VALUES, "strict": SCALARS}),
    }),
    max_size=2,
)  # fmt: skip
FIELDS = st.dictionaries(
    st.sampled_from(sorted({*HONOURED, *LABELS, *REFUSED})) | st.text(max_size=4), VALUES, max_size=4
)
BODIES = st.one_of(
    VALUES,
    st.builds(lambda extra: chat_body(**extra), FIELDS),
    st.builds(lambda messages, extra: {**chat_body(messages=messages), **extra}, MESSAGES, FIELDS),
    st.builds(lambda messages, tools: chat_body(messages=messages, tools=tools), MESSAGES, TOOLS),
)
ANSWERS = (
    '<think>\na\n</think><tool_call>{"name": "auto", "arguments": {}}</tool_call>', "", "[[[[", "plain",
    [200, 300, 9999],
    '{"name": "auto", "parameters": {}}', "<function=text></function>", "\ufffd",
)  # fmt: skip
TOKENIZERS = {
    "chatml": {"template": CHATML}, "llama3": {"template": LLAMA3}, "mistral": {"template": MISTRAL},
    "parts": {"template": PARTS}, "qwen3": {"template": QWEN3}, "hf": {},
}  # fmt: skip


@pytest.fixture(scope="module", params=TOKENIZERS)
def direct(request):
    options = TOKENIZERS[request.param] or {"tokenizer": byte_tokenizer(chat_template=HF_CHATML)}
    answers = [a for a in ANSWERS if request.param != "hf" or isinstance(a, str)]
    with Direct(answers, **options, max_length=500, max_turns=10**9) as direct:
        yield direct


def state_of(session):
    tokens = [len(branch.recorder) for branch in session.branches]
    return tokens, session.template_breaks, session.failure, session.calls


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES, tokenize=st.booleans())
def test_no_request_gets_a_5xx_and_no_refused_one_is_recorded(direct, body, tokenize):
    direct.session.branches = direct.session.branches[-3:]
    before = state_of(direct.session)
    content = json.dumps(body).encode()
    reply = direct.post(content, f"/s/{direct.session_id}/tokenize" if tokenize else None)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert re.search(r"[\ud800-\udfff]", error["message"]) is None
    if reply.status_code != 200 or tokenize:
        assert state_of(direct.session) == before


BYTES = {
    "nothing": b"",
    "no text": b"\xff\xfe",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"messages": ' * 100_000,
    "cut": b'{"a": 1e999',
    "a long number": b"9" * 5000,
    "a deep field": b'{"model": "policy", "chat_template_kwargs": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}",
}


@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
def test_n13_no_bytes_get_a_5xx(direct, content):
    assert direct.post(content).status_code == 400
