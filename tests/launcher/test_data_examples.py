"""Loss masks: exactly the tokens that the model has to produce, for every kind of chat template."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openrlhf.agents.chat.template import PromptError
from openrlhf.launcher.data.chat import ChatRenderer
from openrlhf.launcher.data.examples import (
    Segment,
    SegmentTokenizer,
    TokenRow,
    conversation_segments,
    plain_segments,
)
from support.launcher_tokenizer import ALTERNATING, CHATML, LLAMA_LIKE, byte_tokenizer

REASONING = (  # drops the reasoning of turns before the last question, as Qwen3 does
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED_THINK = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CLOSING = CHATML.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}</s>{% endif %}",
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
TRIMMING = CHATML.replace("m.content", "(m.content | trim)")
PARTS = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat(*contents: Any) -> list[dict[str, Any]]:
    """user, assistant, user, ... with these contents."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def shown(row: TokenRow, tokenizer: Any) -> str:
    """The text with brackets around what is trained on."""
    text, inside = "", False
    for token, trained in zip(row.tokens, row.mask, strict=True):
        text += {(False, True): "[[", (True, False): "]]"}.get((inside, trained), "") + tokenizer.decode([token])
        inside = trained
    return text + ("]]" if inside else "")


def trained(template: str, messages: list[dict[str, Any]], *, every_turn: bool = True, eos: str = "<|im_end|>") -> Any:
    tokenizer = byte_tokenizer(chat_template=template)
    tokenizer.eos_token = eos
    renderer = ChatRenderer(tokenizer, apply_chat_template=True)
    texts = conversation_segments(renderer, renderer.messages(messages), None, every_turn=every_turn)
    found = [shown(SegmentTokenizer(tokenizer).row(segments), tokenizer) for segments in texts]
    return found[0] if len(found) == 1 else found


U, A, E = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"


def test_every_turn_or_the_last() -> None:
    messages = chat("q", "a", "r", "b")
    assert trained(CHATML, messages) == f"{U}q{E}\n{A}[[a{E}]]\n{U}r{E}\n{A}[[b{E}]]"
    assert trained(CHATML, messages, every_turn=False) == f"{U}q{E}\n{A}a{E}\n{U}r{E}\n{A}[[b{E}]]"
    assert trained(CHATML, messages[:3]) == f"{U}q{E}\n{A}[[a{E}]]"


def test_f17_templates_with_the_bos_alternation_a_default_system_and_stripped_text() -> None:
    messages = chat("q", " a ", "r", "b")
    assert (
        trained(LLAMA_LIKE, messages, eos="</s>")
        == "<s>[user]q</s>[assistant][[ a </s>]][user]r</s>[assistant][[b</s>]]"
    )
    assert trained(ALTERNATING, messages, eos="</s>") == ["<s>q[[ a </s>]]", "<s>q a r[[b</s>]]"]
    system = "<|im_start|>system\nYou help.<|im_end|>\n"
    assert trained(DEFAULT_SYSTEM, chat("q", "a")) == f"{system}{U}q{E}\n{A}[[a{E}]]"
    assert trained(TRIMMING, messages) == f"{U}q{E}\n{A}[[a{E}]]\n{U}r{E}\n{A}[[b{E}]]"
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in chat("q", "a")]
    assert trained(PARTS, parts) == f"{U}q{E}\n{A}[[a{E}]]"


def test_f17_a_rewritten_turn_is_trained_on_in_a_text_of_its_own() -> None:
    first = f"{U}q{E}\n{A}"
    assert trained(REASONING, chat("q", "<t></think>a", "r", "<u></think>b")) == [
        f"{first}[[<t></think>a{E}]]",
        f"{first}a{E}\n{U}r{E}\n{A}[[<u></think>b{E}]]",
    ]
    plain = trained(REASONING, chat("q", "a", "r", "b"))
    assert plain == f"{first}[[a{E}]]\n{U}r{E}\n{A}[[b{E}]]"


def test_f17_t10_what_closes_every_text_does_not_end_a_turn() -> None:
    want = f"{U}q{E}\n{A}[[a{E}]]\n{U}r{E}\n{A}[[b{E}]]"
    assert trained(CLOSING, chat("q", "a", "r", "b"), eos="</s>") == want


def test_f17_a_generation_prompt_that_opens_more_than_the_conversation_holds() -> None:
    assert trained(OPENED_THINK, chat("q", "a")) == f"{U}q{E}\n{A}[[a{E}]]"
    assert trained(OPENED_THINK, chat("q", "<think>\nt</think>a")) == f"{U}q{E}\n{A}<think>\n[[t</think>a{E}]]"


def test_t10_a_template_without_end_tokens_gets_one_behind_every_turn() -> None:
    assert trained(BARE, chat("q", "a", "r", "b")) == [
        f"user: q\nassistant: [[a\n{E}]]",
        f"user: q\nassistant: a\nuser: r\nassistant: [[b\n{E}]]",
    ]


def test_an_empty_answer_is_its_end_token() -> None:
    assert trained(CHATML, chat("q", "")) == f"{U}q{E}\n{A}[[{E}]]"


@pytest.mark.parametrize("every_turn", [True, False])
def test_a_conversation_without_an_answer_is_refused(every_turn: bool) -> None:
    words = "an assistant turn" if every_turn else "the last message to be the assistant's answer"
    with pytest.raises(PromptError, match=f"expected {words}, the last role is 'user'"):
        trained(CHATML, chat("q"), every_turn=every_turn)


def test_b043_the_real_end_token_is_trained_on_also_where_it_pads() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    row = SegmentTokenizer(tokenizer).row(plain_segments(ChatRenderer(tokenizer), "p", "a"))
    assert row == TokenRow(tokens=[*tokenizer("pa")["input_ids"], tokenizer.eos_token_id], mask=[False, True, True])
    assert row.cut(2) == TokenRow(tokens=row.tokens[:2], mask=[False, True])  # a cut answer gets no end token


def test_plain_text_gets_template_bos_and_one_end_token() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    renderer = ChatRenderer(tokenizer, input_template="User: {}\nAssistant: ")
    for answer in ("yes", "yes<|im_end|>"):
        row = SegmentTokenizer(tokenizer).row(plain_segments(renderer, "Is it?", answer))
        assert shown(row, tokenizer) == f"<s>User: Is it?\nAssistant: [[yes{E}]]"


def merging_tokenizer() -> Any:
    """Knows "ab" as one token, and puts a space before the first word of a text, as SentencePiece models do."""
    symbols = ["</s>", "▁", "a", "b", "c", "▁a", "ab"]
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[("▁", "a"), ("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def test_no_token_belongs_to_prompt_and_answer_and_none_gets_a_space_of_its_own() -> None:
    tokenizer = merging_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer("ca")["input_ids"]) == ["▁", "c", "a"]
    row = SegmentTokenizer(tokenizer).row([Segment("ca", False), Segment("bca", True)])
    assert tokenizer.convert_ids_to_tokens(row.tokens) == ["▁", "c", "a", "b", "c", "a"]
    assert row.mask == [False, False, False, True, True, True]


def test_the_first_token_is_never_trained_on() -> None:
    row = SegmentTokenizer(byte_tokenizer()).row([Segment("abc", True)])
    assert row.mask == [False, True, True]
    assert SegmentTokenizer(byte_tokenizer()).row([]) == TokenRow(tokens=[], mask=[])
