"""vLLM's parsers of tool calls and reasoning behind the policy's endpoints."""

import json

import pytest

from openrlhf.agents.chat.call import ToolChoice
from openrlhf.agents.chat.tools import Parsed
from openrlhf.rollout.vllm.parsers import REASONING_MARKS, TOOL_MARKS, VllmParser, find_parser, parser_names
from support.agents_chat import Direct, chat_body, message
from support.agents_templates import QWEN3
from support.launcher_tokenizer import byte_tokenizer

pytest.importorskip("vllm")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|python_tag|>",
    "<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<tool_calls>", "</tool_calls>",
)  # fmt: skip
XML = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>"
ANSWERS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n{XML}\n</tool_call>",
    "qwen3_xml": f"<tool_call>\n{XML}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{XML}\n</seed:tool_call>",
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": "x"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "pythonic": '[add(a=1, b="x")]',
    "xlam": '[{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
    "internlm": '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 1, "b": "x"}}<|action_end|>',
    "phi4_mini_json": 'functools[{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
}
"""The same call as models of each family write it."""


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer(chat_template=QWEN3)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


@pytest.mark.parametrize("tool_parser", ANSWERS)
def test_calls_by_the_parser_of_a_family(tool_parser, tokenizer):
    said = VllmParser(tokenizer, tool_parser).read(ANSWERS[tool_parser], TOOLS, None, separate=False)
    assert [(call.name, call.arguments) for call in said.calls] == [("add", {"a": 1, "b": "x"})]
    assert (said.text.strip(), said.malformed) == ("", ())


def test_what_a_parser_cannot_read_stays_text_and_is_told(tokenizer):
    parser = VllmParser(tokenizer, "hermes")
    for text in ('<tool_call>\n{"name": "add", "argu</tool_call>', ANSWERS["hermes"].replace("add", "other")):
        said = parser.read(text, TOOLS, None, separate=False)
        assert (said.text, said.calls, len(said.malformed)) == (text, (), 1)
    assert parser.read("plain", TOOLS, None, separate=False) == Parsed(text="plain", malformed=[])


@pytest.mark.parametrize("reasoning_parser", ["qwen3", "deepseek_r1", "glm45", "auto", ""])
def test_reasoning_by_the_parser_of_a_family(reasoning_parser, tokenizer):
    parser = VllmParser(tokenizer, "hermes", reasoning_parser)
    said = parser.read(f"<think>\nhm\n</think>\n\n{ANSWERS['hermes']}", TOOLS, None, separate=True)
    assert (said.reasoning, said.text, len(said.calls)) == ("hm", "", 1)
    assert parser.read("<think>\nhm\n</think>\n\nyes", (), None, separate=True) == Parsed(text="yes", reasoning="hm")


def test_calls_drafted_in_the_reasoning_are_none(tokenizer):
    said = VllmParser(tokenizer, "hermes").read(f"<think>{ANSWERS['hermes']}</think>no", TOOLS, None, separate=False)
    assert (said.calls, said.text) == ((), f"<think>{ANSWERS['hermes']}</think>no")


def test_names_and_families():
    assert {parser for _, parser in TOOL_MARKS} <= parser_names("tool_parsers")
    assert {parser for _, parser in REASONING_MARKS} <= parser_names("reasoning")
    assert len(parser_names("tool_parsers")) > 40
    assert find_parser("auto", TOOL_MARKS, QWEN3) == "hermes"
    assert find_parser("auto", TOOL_MARKS, "plain") == ""
    assert find_parser("xlam", TOOL_MARKS, QWEN3) == "xlam"


@pytest.mark.parametrize("tool_parser", ["hermes", "qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "llama3_json"])
def test_calls_that_must_come_are_constrained_in_the_models_own_format(tool_parser, tokenizer):
    import xgrammar

    parser = VllmParser(tokenizer, tool_parser)
    names = [bytes([i]) for i in range(256)]
    info = xgrammar.TokenizerInfo([*names, b""], xgrammar.VocabType.RAW, stop_token_ids=[256])
    for choice in (ToolChoice(mode="required"), ToolChoice(mode="named", name="add", parallel=False)):
        tag = {"type": "structural_tag", "format": parser.form(TOOLS, choice)}
        grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(json.dumps(tag))
        matcher = xgrammar.GrammarMatcher(grammar)
        answer = ANSWERS[tool_parser].replace("\n" if tool_parser == "glm45" else "", "")  # as newer GLMs write it
        assert all(matcher.accept_token(byte) for byte in answer.encode())
        assert matcher.accept_token(256)
        assert not xgrammar.GrammarMatcher(grammar).accept_token(ord("w"))


def test_the_tokens_stay_as_they_were_sampled(tokenizer):
    answer = ANSWERS["qwen3_coder"]
    with Direct([answer, "done"], tokenizer=tokenizer, parser=VllmParser(tokenizer, "qwen3_coder")) as direct:
        reply = direct.say([message("hi")], tools=TOOLS)
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "2"}
        assert direct.post(chat_body(messages=[message("hi"), reply, result], tools=TOOLS)).status_code == 200
        (branch,) = direct.session.branches
        assert len(branch.recorder.turns) == 2
        assert answer in direct.texts[0]
