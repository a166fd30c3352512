"""Messages in the form that a chat template takes, turns with what ends them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.agents.chat.template import PromptError
from openrlhf.launcher.data.chat import ChatRenderer, turn_stops
from openrlhf.launcher.data.examples import conversation_segments
from openrlhf.launcher.data.turns import EndKind, TurnEnd
from openrlhf.launcher.tokenizers import chat_template
from support.chat_families import FAMILIES
from support.chat_family import chatml
from support.chat_sweep import SHAPES, TOOL, family_tokenizer, outcome
from support.launcher_tokenizer import CHATML, byte_tokenizer

A = "<|im_start|>assistant\n"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def renderer(template: str, **options: Any) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(chat_template=template), apply_chat_template=True, **options)


def of(name: str) -> ChatRenderer:
    family = FAMILIES[name]
    tokenizer = family_tokenizer(family.template(), bos=family.bos or "<s>", eos=family.eos, special=family.special)
    return ChatRenderer(tokenizer, apply_chat_template=True)


def trained(chat: ChatRenderer, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    texts = conversation_segments(chat, chat.messages(messages), tools, every_turn=True)
    return [segment.text for segments in texts for segment in segments if segment.trained]


def chat(**call: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **call}]


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "c00000001", "type": "function", "function": {"name": "look_up", "arguments": arguments}}]


def test_t01_a_template_that_writes_no_tool_calls_is_refused() -> None:
    for template in (CHATML, LOOP.replace("{}", "{{ m.content + '' }}") + ASK):
        for content in (None, "", "Let me see."):
            with pytest.raises(PromptError, match=r"^the chat template does not write tool calls; use one that does"):
                trained(renderer(template), chat(content=content, tool_calls=call({"place": "x"})))
    with pytest.raises(PromptError, match=r"^the chat template does not write tool calls"):
        renderer(CHATML).render(chat(content=None, tool_calls=call({})))
    lost = LOOP.replace("{}", "{% if m.content is none %}{{ m.tool_calls }}{% else %}{{ m.content }}{% endif %}")
    with pytest.raises(
        PromptError, match=r"message 1: the chat template does not write its tool calls \(name 'look_up'"
    ):
        renderer(lost + ASK).render(chat(tool_calls=call({"a": 1})))


@pytest.mark.parametrize("content", ["{% for p in m.content %}{{ p.text }}{% endfor %}", "{{ m.content + '' }}"])
def test_t02_null_content_becomes_what_the_template_takes(content: str) -> None:
    template = LOOP.replace("{}", content + "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}")
    messages = chat(content=None, tool_calls=call({"place": "x"}))
    assert trained(renderer(template + ASK), messages) == ['{"name": "look_up", "arguments": {"place": "x"}}<|im_end|>']


@pytest.mark.parametrize("arguments", [{"place": "Ωx"}, '{"place": "Ωx"}'])
def test_t03_arguments_in_the_form_that_the_template_takes(arguments: Any) -> None:
    text = LOOP.replace(
        "{}",
        "{{ m.content or '' }}{% for c in m.tool_calls %}{{ '' + c.function.name + c.function.arguments }}{% endfor %}",
    )
    mapping = text.replace("c.function.arguments", "c.function.arguments.items() | list | string")
    messages = chat(content="", tool_calls=call(arguments))
    assert trained(renderer(text + ASK), messages) == ['look_up{"place": "Ωx"}<|im_end|>']
    assert trained(of("qwen3-coder"), messages, [TOOL]) == [
        "\n<tool_call>\n<function=look_up>\n<parameter=place>\nΩx\n</parameter>\n</function>\n</tool_call><|im_end|>"
    ]
    neither = (
        r"takes the arguments of a tool call neither as an object \(its keys are not written as JSON\) "
        r"nor as JSON text \(UndefinedError: "
    )
    with pytest.raises(PromptError, match=neither):
        trained(renderer(mapping + ASK), messages)


def test_t04_text_for_a_template_that_reads_parts_and_the_reverse() -> None:
    parts = LOOP.replace("{}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}")
    given = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in chat()]
    for template in (parts + ASK, CHATML):
        for messages in (chat(), given):
            assert renderer(template).render(messages[:1]) == f"<|im_start|>user\nq<|im_end|>\n{A}"
            assert trained(renderer(template), messages) == ["a<|im_end|>"]
    two = [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "input_text", "text": "r"}]}]
    assert renderer(CHATML).render(two) == f"<|im_start|>user\nq\nr<|im_end|>\n{A}"


def test_t06_a_way_out_of_a_generation_prompt_that_no_conversation_holds() -> None:
    other = CHATML.replace(
        "{% if add_generation_prompt %}<|im_start|>assistant", "{% if add_generation_prompt %}<|im_start|>answer"
    )
    with pytest.raises(
        PromptError, match=r"message 1: .* \(add_generation_prompt\).* with --data\.tokenizer_chat_template$"
    ):
        trained(renderer(other.replace("<|im_start|>{{ m.role }}", "{{ m.role }}")), chat())


def test_t06_the_template_that_replaces_the_tokenizers_is_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("\ufeff" + CHATML, encoding="utf-8")
    assert chat_template(CHATML) == CHATML == chat_template(str(tmp_path / "chat.jinja"))
    with pytest.raises(
        ValueError, match=r"--data\.tokenizer_chat_template 'chat\.jinja': neither a template .* nor the p"
    ):
        chat_template("chat.jinja")


def test_t06_a_question_that_is_written_anew_once_it_is_answered() -> None:
    """Mistral's system text stands in the last question only: the answer is trained on behind the prompt itself."""
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if loop.last %}{{ messages[0].content }} {% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    chat = renderer(template)
    chat.tokenizer.eos_token = "</s>"
    messages = chat.messages([{"role": "system", "content": "s"}, *globals()["chat"]()])
    segments = conversation_segments(chat, messages, None, every_turn=False)
    assert [(s.text, s.trained) for s in segments[0]] == [("<s>[INST] s q[/INST]", False), (" a</s>", True)]


def test_t09_roles_that_mean_the_usual_ones() -> None:
    want = f"<|im_start|>user\nq<|im_end|>\n{A}a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n{A}"
    strict = LOOP.replace("{}", "{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}") + ASK
    for user, assistant in (("User", "Assistant"), ("human", "gpt"), ("HUMAN", "model"), ("user", "bot")):
        messages = [{"role": r, "content": c} for r, c in ((user, "q"), (assistant, "a"), (user, "r"))]
        assert renderer(strict).render(messages) == want
    for role in ("narrator", "critic"):
        messages = [{"role": "user", "content": "q"}, {"role": role, "content": "words of it"}]
        with pytest.raises(PromptError, match=f"message 1: the chat template drops role '{role}'; use system, user, "):
            renderer(strict).render(messages)
    assert "<|im_start|>narrator\nw" in renderer(CHATML).render([{"role": "narrator", "content": "w"}])
    instead = strict.replace("('user', 'assistant')", "('system', 'user', 'tool')")
    given = [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}]
    assert renderer(instead).render(given).startswith("<|im_start|>system\nd<|im_end|>\n<|im_start|>user\nq")


def test_reasoning_under_the_key_that_the_template_reads() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert trained(of("intern-s1"), chat(**{key: "t"})) == ["<think>\nt\n</think>\n\na<|im_end|>"]


ENDS = {
    "chatml": (EndKind.INSIDE, "<|im_end|>"),
    "qwen2.5-base": (EndKind.INSIDE, "<|im_end|>"),
    "llama-2": (EndKind.INSIDE, "</s>"),
    "gemma": (EndKind.INSIDE, "<end_of_turn>"),
    "phi-3": (EndKind.INSIDE, "<|end|>"),
    "harmony": (EndKind.LAST, "<|return|>"),
    "falcon-3": (EndKind.LAST, "<|endoftext|>"),
    "glm-4": (EndKind.NEXT, "<|user|>"),
    "falcon": (EndKind.NONE, ""),
}
STOPS = {
    "chatml": [],
    "qwen2.5-base": ["<|im_end|>"],
    "gemma": ["<end_of_turn>"],
    "phi-3": ["<|end|>"],
    "harmony": ["<|call|>"],
    "glm-4": ["<|user|>", "<|observation|>"],
    "falcon": [],
}


@pytest.mark.parametrize("name", ENDS)
def test_t10_where_a_turn_ends(name: str) -> None:
    assert of(name).ends.of({"role": "assistant", "content": "a"}) == TurnEnd(*ENDS[name])


@pytest.mark.parametrize("name", STOPS)
def test_t10_the_engine_stops_where_a_turn_ends(name: str) -> None:
    tokenizer = of(name).tokenizer
    assert tokenizer.convert_ids_to_tokens(turn_stops(tokenizer)) == STOPS[name]


def test_t10_no_chat_template_means_no_further_stops() -> None:
    assert turn_stops(byte_tokenizer()) == ()


def test_t10_the_next_roles_marker_is_trained_in_every_turn() -> None:
    messages = [*chat(), {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
    texts = conversation_segments(of("glm-4"), of("glm-4").messages(messages), None, every_turn=True)
    shown = ["".join(f"[[{s.text}]]" if s.trained else s.text for s in segments) for segments in texts]
    assert shown == ["[gMASK]<sop><|user|>\nq<|assistant|>\n[[a<|user|>]]\nr<|assistant|>\n[[b<|user|>]]"]
    assert trained(of("glm-4"), chat(content="", tool_calls=call({"place": "x"})), [TOOL]) == [
        'look_up\n{"place": "x"}<|observation|>'
    ]


def test_t10_another_end_inside_a_conversation_than_behind_it() -> None:
    assert trained(of("harmony"), SHAPES["turns"]) == [
        f"<|channel|>final<|message|>Answer {n}.<|return|>" for n in ("one", "two")
    ]
    assert trained(of("phi-3"), SHAPES["turns"]) == ["Answer one.<|end|>", "Answer two.<|end|>"]


def test_a_turn_of_which_nothing_is_written_is_refused() -> None:
    silent = LOOP.replace("{}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}") + ASK
    found = outcome(renderer(silent), chat(content="Answer one."))
    assert found.word == "refused"
    assert "message 1: the chat template writes nothing of the assistant's turn" in found.detail


def test_a_lost_result_of_a_tool_is_said() -> None:
    """Whole contents of a role that a template knows and leaves out are counted, also where the text is short."""
    deaf = chatml(call="{{ f.name }}{{ f.arguments | tojson }}", tool="<|im_start|>tool\n<|im_end|>\n").template()
    chat = ChatRenderer(family_tokenizer(deaf), apply_chat_template=True)
    chat.render([*SHAPES["call-null"][:2], {"role": "tool", "tool_call_id": "1", "content": "4"}], [TOOL])
    assert [str(lost) for lost in chat.lost] == ["message 2 (tool), content: '4'"]
