"""Whatever a client sends in whichever format: an answer or a 4xx, never a 5xx, and nothing of a refused one stays."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrlhf.agents.chat.wires import anthropic, responses
from support.agents_chat import Direct, Reader, message
from support.agents_templates import CHATML, PARTS, QWEN3

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.sampled_from(["auto", "add", "enabled", "\ud800", "policy", "user", "c1", "data:1", "\x00", "any"]),
)  # fmt: skip
KEYS = st.sampled_from(["type", "text", "name", "content", "role", "id", "budget_tokens", "format", "schema", "effort"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def blocks(kinds, fields):
    """Blocks of one of these kinds with some of these fields, right or wrong."""
    return st.fixed_dictionaries({"type": st.sampled_from(kinds) | SCALARS}, optional=fields)


SOURCE = st.fixed_dictionaries(
    {"type": st.sampled_from(["base64", "url", "file"])},
    optional={"media_type": SCALARS, "data": SCALARS, "url": SCALARS},
)
BLOCKS = st.lists(
    blocks(
        ["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "document"],
        {
            "text": SCALARS, "thinking": SCALARS, "signature": SCALARS, "id": SCALARS, "name": SCALARS, "input": VALUES,
            "tool_use_id": SCALARS, "content": VALUES, "is_error": SCALARS, "source": SOURCE | VALUES,
            "cache_control": VALUES,
        },
    ),
    max_size=3,
)  # fmt: skip
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES}, optional={"content": st.text(max_size=5) | BLOCKS | VALUES}), max_size=4
)
ANTHROPIC_TOOLS = st.lists(
    st.fixed_dictionaries({"name": SCALARS}, optional={"input_schema": VALUES, "type": SCALARS, "strict": SCALARS}),
    max_size=2,
)
PARTS_OF_ITEMS = st.lists(
    blocks(
        ["input_text", "output_text", "input_image", "input_file", "reasoning_text"],
        {"text": SCALARS, "image_url": SCALARS, "detail": SCALARS, "annotations": VALUES},
    ),
    max_size=3,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])},
        optional={
            "role": ROLES, "content": SCALARS | PARTS_OF_ITEMS, "id": SCALARS, "call_id": SCALARS, "name": SCALARS,
            "arguments": SCALARS | st.just("{}"), "output": SCALARS | PARTS_OF_ITEMS, "summary": VALUES,
            "encrypted_content": SCALARS, "status": SCALARS,
        },
    ),
    max_size=4,
)  # fmt: skip
RESPONSE_TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "web_search"])},
        optional={"name": SCALARS, "parameters": VALUES, "strict": SCALARS},
    ),
    max_size=2,
)


def fields(module):
    names = sorted({*module.HONOURED, *module.LABELS, *module.REFUSED})
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=4), VALUES, max_size=4)


MESSAGES_BODY = {"model": "policy", "max_tokens": 9, "messages": [message("hi")]}
RESPONSES_BODY = {"model": "policy", "input": "hi"}
BODIES = {
    "messages": st.one_of(
        VALUES,
        fields(anthropic).map(lambda extra: {**MESSAGES_BODY, **extra}),
        st.builds(
            lambda messages, tools, extra: {**MESSAGES_BODY, "messages": messages, "tools": tools, **extra},
            MESSAGES, ANTHROPIC_TOOLS, fields(anthropic),
        ),
        MESSAGES.map(lambda messages: {**MESSAGES_BODY, "messages": messages}),
    ),
    "responses": st.one_of(
        VALUES,
        fields(responses).map(lambda extra: {**RESPONSES_BODY, **extra}),
        st.builds(
            lambda items, tools, extra: {**RESPONSES_BODY, "input": items, "tools": tools, **extra},
            ITEMS, RESPONSE_TOOLS, fields(responses),
        ),
        ITEMS.map(lambda items: {**RESPONSES_BODY, "input": items}),
    ),
}  # fmt: skip
SCOPES = [HealthCheck.function_scoped_fixture]
ANSWERS = (
    '<think>\na\n</think><tool_call>{"name": "auto", "arguments": {"a": "\\ud800"}}</tool_call>', "", "[[[[", "plain",
    [200, 300, 9999], '<tool_call>{"name": "add", "argu', "\ufffd",
)  # fmt: skip
SERVERS = {"chatml": {"template": CHATML}, "qwen3": {"template": QWEN3}, "parts": {"template": PARTS}}


@pytest.fixture(scope="module", params=SERVERS)
def direct(request):
    options: dict = {"image_reader": Reader()} if request.param == "parts" else {}
    options |= SERVERS[request.param]
    with Direct(ANSWERS, **options, max_length=500, max_turns=10**9) as direct:
        yield direct


def state_of(session):
    tokens = [len(branch.recorder) for branch in session.branches]
    return tokens, session.template_breaks, session.failure, session.calls, len(session.stored), session.malformed


@pytest.mark.parametrize("path", BODIES)
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_request_gets_a_5xx_and_no_refused_one_is_recorded(direct, path, data):
    direct.session.branches = direct.session.branches[-3:]
    body = data.draw(BODIES[path])
    before = state_of(direct.session)
    reply = direct.post(json.dumps(body).encode(), f"/s/{direct.session_id}/v1/{path}")
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
        assert re.search(r"[\ud800-\udfff]", reply.text) is None
        assert state_of(direct.session) == before
