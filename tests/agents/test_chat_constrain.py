"""What an answer is constrained to, as xgrammar reads it."""

import pytest

from openrlhf.agents.chat.call import AnswerFormat, Call, ToolChoice
from openrlhf.agents.chat.constrain import structural_tag
from openrlhf.agents.chat.fields import ApiError
from openrlhf.agents.chat.messages import Conversation
from openrlhf.agents.chat.tools import LightParser
from openrlhf.agents.engine import SamplingParams

xgrammar = pytest.importorskip("xgrammar")

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "sub"}},
]
ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
SUB = ADD.replace("add", "sub")
FORMAT = AnswerFormat(schema={"enum": ["yes", "no"]}, field="response_format")
THOUGHT = f"<think>\nI draft {ADD}\n</think>\n\n"
REQUIRED, FEW = ToolChoice(mode="required"), ToolChoice(parallel=False)
NAMED = ToolChoice(mode="named", name="sub", parallel=False)

CASES = {
    # what is asked, the tag that ends the reasoning under way, whether the template knows reasoning: allowed, forbidden
    "format": ({"answer_format": FORMAT}, None, False, ['"yes"'], ["yes", ' "yes"', ADD, f'{THOUGHT}"yes"']),
    "format behind reasoning": (
        {"answer_format": FORMAT}, None, True, ['"no"', f'{THOUGHT}"no"'], [f"{THOUGHT}no", "<think>no end", "x"],
    ),
    "format in reasoning": (
        {"answer_format": FORMAT}, "</think>", True, ['hm</think>\n\n"no"'], ['"no"', "hm</think>no"],
    ),
    "required": (
        {"tools": TOOLS, "tool_choice": REQUIRED}, None, True, [ADD, f"{ADD}\n{SUB}", THOUGHT + SUB], ["no", ADD[:-1]],
    ),
    "named": ({"tools": TOOLS, "tool_choice": NAMED}, None, False, [SUB], [ADD, f"{SUB}\n{SUB}", f"x{SUB}"]),
    "one at most": (
        {"tools": TOOLS, "tool_choice": FEW}, None, True, ["no", ADD, f"so: {ADD}"], [f"{ADD}\n{SUB}", f"{ADD} and"],
    ),
    "format or calls": (
        {"tools": TOOLS, "answer_format": FORMAT}, None, False, ['"yes"', ADD, f"{ADD}\n{SUB}"], ["yes", f'"yes"{ADD}'],
    ),
}  # fmt: skip


def call(**changes):
    conversation = Conversation(messages=[], keys=[], images=[])
    return Call(model="policy", conversation=conversation, sampling=SamplingParams(), **changes)


def allows(tag, text):
    info = xgrammar.TokenizerInfo(
        [*(bytes([i]) for i in range(256)), b""], xgrammar.VocabType.RAW, stop_token_ids=[256]
    )
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(tag))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(256)


@pytest.mark.parametrize("name", CASES)
def test_what_is_allowed(name):
    asked, closing, reasons, allowed, forbidden = CASES[name]
    tag = structural_tag(call(**asked), LightParser(), closing, "<think>" if reasons else "", guided=True)
    assert [text for text in allowed if not allows(tag, text)] == []
    assert [text for text in forbidden if allows(tag, text)] == []


def test_free_answers_are_free_and_engines_that_cannot_refuse():
    for asked in ({}, {"tools": TOOLS}, {"tool_choice": REQUIRED}):
        assert structural_tag(call(**asked), LightParser(), None, "", guided=False) == ""
    with pytest.raises(ApiError) as caught:
        structural_tag(call(answer_format=FORMAT), LightParser(), None, "", guided=False)
    assert (caught.value.status, caught.value.param) == (400, "response_format")
