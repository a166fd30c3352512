"""Tool calls in answers: every known format both ways, reasoning, drafts, tools that were not offered (S02, S07)."""

import json
import logging
from typing import Any

import pytest

from openrlhf.agents import failures
from openrlhf.agents.chat.reasoning import opened, split_reasoning
from openrlhf.agents.chat.tool_formats import FORMATS, ToolCall
from openrlhf.agents.chat.tools import parse_answer, read_offered, wire_call
from openrlhf.agents.testing import ByteTokenizer
from support.agents_chat import Direct, chat_body, message
from support.agents_templates import CHATML, QWEN3


def parse_tool_calls(text, offered, closing=None):
    said = parse_answer(text, offered, closing)
    return said.text, list(said.calls)


PARAMETERS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "metric": {"type": "boolean"},
    "tags": {"type": "array"},
}


def function(name, properties=None, **changes):
    schema = {"type": "object", "properties": properties or {}}
    return {"type": "function", "function": {"name": name, "parameters": schema, **changes}}


OFFERED = read_offered([function("weather", PARAMETERS), function("now")])
WEATHER = ToolCall(name="weather", arguments={"city": "Paris", "days": 2})
NOW = ToolCall(name="now", arguments={})
J_WEATHER = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
J_NOW = '{"name": "now", "arguments": {}}'
FULL = {"city": "5", "days": 2, "metric": True, "tags": ["a", 1]}

# format: answers with the text that is left and the calls in them
CALLS = {
    "hermes": [
        (f"<tool_call>\n{J_WEATHER}\n</tool_call>", "", [WEATHER]),
        (f"hm <tool_call>{J_WEATHER}</tool_call>\n<tool_call>{J_NOW}</tool_call>", "hm", [WEATHER, NOW]),
        (f"<tool_call>{J_NOW}", "", [NOW]),
        (f"<tool_call> draft <tool_call>{J_NOW}</tool_call>", "<tool_call> draft", [NOW]),
        (f"<tool_call>{{bad}}</tool_call> <tool_call>{J_NOW}</tool_call>", "<tool_call>{bad}</tool_call>", [NOW]),
        ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
    ],
    "qwen3_coder": [
        (
            "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n2\n"
            '</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n["a", 1]\n</parameter>\n'
            "</function>\n</tool_call>",
            "I look.",
            [ToolCall(name="weather", arguments=FULL)],
        ),
        ("<function=now>\n</function>\n</tool_call>", "", [NOW]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\n a\n</function>\n</tool_call>", None, []),
        (
            "<function=weather><parameter=city>\n\n if x:\n  <parameter=y>\n\n</parameter></function>",
            "",
            [ToolCall(name="weather", arguments={"city": "\n if x:\n  <parameter=y>\n"})],
        ),
    ],
    "glm": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n<arg_key>tags</arg_key>\n"
            '<arg_value>["a", 1]</arg_value>\n</tool_call>',
            "",
            [ToolCall(name="weather", arguments=FULL)],
        ),
        ("so\n<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>", "so", [NOW, NOW]),
        (
            "<tool_call>weather<arg_key>other</arg_key><arg_value>{}</arg_value></tool_call>",
            "",
            [ToolCall(name="weather", arguments={"other": {}})],
        ),
    ],
    "kimi_k2": [
        (
            "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "ok",
            [
                ToolCall(name="weather", arguments=WEATHER.arguments, id="functions.weather:0"),
                ToolCall(name="now", arguments={}, id="functions.now:1"),
            ],
        ),
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
            "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            [WEATHER, NOW],
        ),
    ],
    "deepseek_v31": [
        (
            'I see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": 2}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "I see.",
            [WEATHER, NOW],
        ),
    ],
    "mistral": [
        (f"ok [TOOL_CALLS][{J_WEATHER}, {J_NOW}]", "ok", [WEATHER, NOW]),
        (
            'x[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}',
            "x",
            [WEATHER, ToolCall(name="now", arguments={}, id="abc123def")],
        ),
        ("[TOOL_CALLS]now{}", "", [NOW]),
    ],
    "lfm2": [
        (
            '<|tool_call_start|>[weather(city="Paris", days=2), now()]<|tool_call_end|>Wait.',
            "Wait.",
            [WEATHER, NOW],
        ),
        (
            "<|tool_call_start|>[weather(city='5', days=2, metric=true, tags=['a', 1])]<|tool_call_end|>",
            "",
            [ToolCall(name="weather", arguments=FULL)],
        ),
        (f"<|tool_call_start|>[{J_NOW}]<|tool_call_end|>", "", [NOW]),
        (
            "<|tool_call_start|>weather(days=-1, tags={'k': (None, 1.5)})<|tool_call_end|>",
            "",
            [ToolCall(name="weather", arguments={"days": -1, "tags": {"k": [None, 1.5]}})],
        ),
    ],
    "llama_json": [
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', "", [WEATHER]),
        (f" {J_NOW}; {J_NOW}\n", "", [NOW, NOW]),
    ],
}
CASES = [(name, *case) for name, cases in CALLS.items() for case in cases]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(failures, "_said", set())


@pytest.mark.parametrize(("name", "text", "rest", "calls"), CASES)
def test_s07_formats(name, text, rest, calls):
    assert parse_tool_calls(text, OFFERED) == (text if rest is None else rest, calls)
    if calls:
        assert FORMATS[name](text, OFFERED)[1] == calls


@pytest.mark.parametrize(("name", "text", "rest", "calls"), [case for case in CASES if case[3]])
def test_s07_only_offered_tools_are_called(name, text, rest, calls, caplog):
    assert parse_tool_calls(text, read_offered([function("other")])) == (text, [])
    assert parse_tool_calls(text, {}) == (text, [])
    assert parse_answer(text, read_offered([function("other")])).malformed != ()
    assert "looks like a tool call" in caplog.text
    assert len(caplog.records) == 1


def test_s07_every_format_has_cases():
    assert set(CALLS) == set(FORMATS)


PLAIN = [
    '{"a": 1}', "[1, 2]", '{"name": "now"}', "The weather(city='Paris') is fine.", "Use <b>function</b> = 3.", "",
    "a < b and tool_call > c", '```json\n{"x": 1}\n```',
]  # fmt: skip


@pytest.mark.parametrize("text", PLAIN)
def test_s07_other_text_is_no_call_and_no_draft(text, caplog):
    assert parse_tool_calls(text, OFFERED) == (text, [])
    assert not caplog.records


DRAFTS = {
    "malformed": "<tool_call>{bad}</tool_call>",
    "cut by length": '<tool_call>{"name": "weather", "argum',
    "qwen cut by length": "<tool_call>\n<function=weather>\n<parameter=city>\nPar",
    "glm cut by length": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa\n</tool_call>",
    "unknown format": '<function_call>{"name": "now"}</function_call>',
    "arguments of a wrong type": '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    "positional": "<|tool_call_start|>[weather('Paris')]<|tool_call_end|>",
    "code": "<|tool_call_start|>[weather(city=open('x'))]<|tool_call_end|>",
    "bare JSON of another tool": '{"name": "rain", "parameters": {}}',
}


@pytest.mark.parametrize("text", DRAFTS.values(), ids=DRAFTS)
def test_s07_drafts_stay_text_with_one_warning(text, caplog):
    for _ in range(3):
        assert parse_tool_calls(text, OFFERED) == (text, [])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert repr(text[text.find("<") if "<" in text else 0 :][:20])[1:-1] in caplog.text


def test_n13_a_call_with_many_parameters():
    text = f"<function=weather>{'<parameter=city>a</parameter>' * 20_000}</function>"
    assert parse_tool_calls(text, OFFERED) == ("", [ToolCall(name="weather", arguments={"city": "a"})])


HUGE = {
    "openings": "<tool_call>" * 50_000,
    "closings": "</tool_call>" * 50_000,
    "pairs": "<tool_call></tool_call>" * 20_000,
    "functions": "<function=now>" * 50_000,
    "parameters": "<function=weather>" + "<parameter=a>" * 50_000 + "</function>",
    "deep JSON": "<tool_call>" + "[" * 200_000 + "</tool_call>",
    "deep arguments": '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 100_000,
    "deep mistral": "[TOOL_CALLS]" + "[" * 200_000,
    "mistral marks": "[TOOL_CALLS]" * 50_000,
    "deep python": "<|tool_call_start|>" + "[" * 100_000 + "<|tool_call_end|>",
    "signs in python": "<|tool_call_start|>[now(a=" + "-" * 100_000 + "1)]<|tool_call_end|>",
    "sum in python": "<|tool_call_start|>[now(a=" + "1+" * 20_000 + "1)]<|tool_call_end|>",
    "bare": "[" * 200_000,
    "many bare": (J_NOW + ";") * 5_000 + "x",
    "thoughts": "<think>" * 50_000,
    "pairs of thoughts": "<think></think>" * 20_000 + "x",
    "closing thoughts": "</think>" * 50_000,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_n13_degenerate_answers_are_text_in_bounded_time(text):
    assert parse_tool_calls(text, OFFERED) == (text, [])


CALL = f"<tool_call>{J_NOW}</tool_call>"
DRAFT = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
REASONING = {
    "closed": (f"<think>maybe {DRAFT}</think>\n{CALL}", None, f"<think>maybe {DRAFT}</think>", 1),
    "malformed draft": (f"<think>maybe <tool_call>{{</think>\n{CALL}", None, "<think>maybe <tool_call>{</think>", 1),
    "opened by the prompt": (f"maybe {DRAFT}</think>{CALL}", "</think>", f"maybe {DRAFT}</think>", 1),
    "opened out of sight": (f"maybe {DRAFT}</think>{CALL}", None, f"maybe {DRAFT}</think>", 1),
    "not closed": (f"<think>maybe {DRAFT}", None, f"<think>maybe {DRAFT}", 0),
    "not closed, opened by the prompt": (f"maybe {DRAFT}", "</think>", f"maybe {DRAFT}", 0),
    "twice": (f"<think>{DRAFT}</think>a{CALL}<think>{DRAFT}</think>b{CALL}", None, None, 2),
    "a tag that is talked about": (f"Write <think> first. {CALL}", None, "Write <think> first.", 1),
    "another pair": (f"[THINK]{DRAFT}[/THINK]{CALL}", None, f"[THINK]{DRAFT}[/THINK]", 1),
    "only a draft": (f"<think>{DRAFT}</think>No call.", None, f"<think>{DRAFT}</think>No call.", 0),
}


@pytest.mark.parametrize(("text", "closing", "rest", "count"), REASONING.values(), ids=REASONING)
def test_s02_only_what_stands_behind_the_reasoning_is_parsed(text, closing, rest, count):
    found, calls = parse_tool_calls(text, OFFERED, closing)
    assert calls == [NOW] * count
    assert rest is None or found == rest


def test_s02_reasoning_that_the_prompt_opens():
    assert opened("...assistant\n<think>\n") == "</think>"
    assert opened("...assistant\n<think>\n\n</think>\n\n") is None
    assert opened("user: what is <think> for?\nassistant:") is None
    assert opened("...<think>so", prefill="<think>so") == "</think>"
    assert split_reasoning("a</think>b") == [(True, "a</think>"), (False, "b")]
    assert split_reasoning("") == []


@pytest.mark.parametrize(
    "template", [QWEN3, QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")]
)
def test_s02_over_the_server(template):
    answer = f"<think>\nmaybe {DRAFT}\n</think>\n\n{CALL}"
    answer = answer if template == QWEN3 else answer.removeprefix("<think>\n")
    with Direct([answer], template=template) as direct:
        reply = direct.say([message("x")], tools=[function("weather"), function("now")])
    assert [call["function"]["name"] for call in reply["tool_calls"]] == ["now"]
    assert "maybe" in reply["content"]


def test_s07_text_arguments_follow_the_schema():
    def days(value, **schema):
        offered = read_offered([function("f", {"x": schema})])
        return parse_tool_calls(f"<function=f><parameter=x>{value}</parameter></function>", offered)[1][0].arguments[
            "x"
        ]

    assert days("2", type="string") == "2"
    assert days("2", type="integer") == 2
    assert days("null", type=["string", "null"]) is None
    assert days("2", type=["string", "null"]) == "2"
    assert days("False", type="boolean") is False
    assert days("two", type="integer") == "two"  # as written: the tool says what is wrong
    assert days("2.5") == 2.5
    assert days("plain words") == "plain words"


def test_s07_a_strict_tool_is_called_only_with_what_its_schema_allows(caplog):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    offered = read_offered([{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}])
    good, bad = ('<tool_call>{"name": "f", "arguments": {"n": %s}}</tool_call>' % n for n in ("1", '"one"'))  # noqa: UP031
    assert parse_tool_calls(good, offered)[1] == [ToolCall(name="f", arguments={"n": 1})]
    assert parse_tool_calls(bad, offered) == (bad, [])
    assert "looks like a tool call" in caplog.text


def test_ids_are_nine_letters_and_digits_and_the_same_in_every_run():
    calls = [f"{CALL}{CALL}", CALL]
    seen = []
    for _ in range(2):
        with Direct(calls, template=QWEN3) as direct:
            replies = [direct.say([message(text)], tools=[function("now")]) for text in "ab"]
        seen.append([call["id"] for reply in replies for call in reply["tool_calls"]])
    assert seen == [["call00001", "call00002", "call00003"]] * 2
    assert wire_call(ToolCall(name="f", arguments={"a": "ä"}, id="functions.f:0"), 1) == {
        "id": "functions.f:0",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": "ä"}'},
    }


# Templates in the manner of the models: how each writes a call that it finds in the history.
CALLING = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEEPSEEK = CALLING.replace(
    "CALL",
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\n```json\n'"
    " + c.function.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
)
KIMI = CALLING.replace(
    "CALL",
    "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{ '<|tool_call_end|><|tool_calls_section_end|>' }}",
)
PRINTS = CALLING.replace("CALL", "{{ '<tool_call>' }}{{ c.function.arguments }}{{ '</tool_call>' }}")


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK, KIMI, PRINTS], ids=["qwen3", "deepseek", "kimi", "prints"])
@pytest.mark.parametrize("name", ["hermes", "deepseek_v3", "deepseek_v31", "kimi_k2", "mistral", "lfm2", "qwen3_coder"])
def test_s07_the_conversation_goes_on_from_the_call_as_it_was_sampled(name, template):
    text = CALLS[name][0][0]
    tools = [function("weather", PARAMETERS), function("now")]
    with Direct([text, "fine"], template=template) as direct:
        messages: list[dict[str, Any]] = [message("x")]
        messages.append(direct.say(messages, tools=tools))
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in messages[-1]["tool_calls"]
        ]
        direct.say(messages, tools=tools)
        assert len(direct.texts) == 1
        assert direct.texts[0].count(text) == 1
        assert direct.session.template_breaks == 0


def test_s07_the_tokenizer_of_the_test_kit_writes_tools_and_calls():
    tools = [function("now")]
    with Direct([CALL, "fine"], tokenizer=ByteTokenizer()) as direct:
        messages: list[dict[str, Any]] = [message("x")]
        messages.append(direct.say(messages, tools=tools))
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "noon"})
        direct.say(messages, tools=tools)
        history = f"<|user|>x<|end|><|assistant|>{CALL}<|end|><|tool|>noon<|end|><|assistant|>fine<|end|>"
        assert direct.texts == [f"<|tool|>{json.dumps(tools)}<|end|>{history}"]


def test_s07_arguments_as_text_where_the_template_joins_text():
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    history = [message("x"), {"role": "assistant", "content": None, "tool_calls": [call]}, message("y", "tool")]
    for template, expected in ((DEEPSEEK, '```json\n{"a": 1}\n```'), (PRINTS, '<tool_call>{"a": 1}</tool_call>')):
        with Direct(["ok"], template=template) as direct:
            direct.say(history)
            assert expected in direct.prompts[0]


def test_s07_a_template_that_writes_no_calls_refuses_those_of_others_only():
    template = CHATML.replace("m.content", "(m.content or '')")
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [message("x"), {"role": "assistant", "content": None, "tool_calls": [call]}, message("y", "tool")]
    with Direct(["ok"], template=template) as direct:
        reply = direct.post(chat_body(messages=history))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages[1].tool_calls"
        assert json.loads(reply.text)["error"]["message"].endswith("does not write tool calls")
