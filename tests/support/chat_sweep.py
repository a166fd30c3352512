"""One conversation of every shape through a chat template: what is trained on, held against the texts of its turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openrlhf.agents.chat.template import PromptError
from openrlhf.launcher.data.chat import ChatRenderer
from openrlhf.launcher.data.examples import SegmentTokenizer, conversation_segments, written

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a thing.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where."}},
            "required": ["place"],
        },
    },
}
_MARKS = re.compile(
    r"<\|[^|<>\s{}']{1,40}\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|<\|?turn\|?>|\[/?[A-Z_]{3,20}\]"
    r"|<\[?[a-z]*(?:BOS|EOS)[a-zA-Z_]*\]?>|<(?:bos|eos|end|start)>|\[(?:gMASK|BOS|EOS)\]|<extra_id_\d>|<e(?:nd|od)_[a-z_]+>"
)
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<｜end▁of▁sentence｜>", "<|end|>",
    "<|return|>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "[|endofturn|]", "<|eot|>", "<|eom|>", "</s>",
)  # fmt: skip
"""Usual end-of-sequence tokens, for templates that come without a tokenizer."""


def family_tokenizer(template: str, *, bos: str = "<s>", eos: str | None = None, special: Sequence[str] = ()) -> Any:
    """One id per byte, and one for everything in the template that looks like a special token (and for `special`)."""
    marks = sorted({*_MARKS.findall(template), *special, bos, "</s>"})
    eos = eos or next(end for end in ENDS if end in marks)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(sorted({*marks, eos}))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, additional_special_tokens=[m for m in marks if m != bos]
    )
    tokenizer.chat_template = template
    return tokenizer


def _call(number: int, arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def _tools(arguments: Any, content: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Question one?"},
        {"role": "assistant", "content": content, "tool_calls": [_call(1, arguments)]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "Result one"},
        {"role": "assistant", "content": "Answer one."},
    ]


def _turns(**extra: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Question one?"},
        {"role": "assistant", "content": "Answer one.", **{k: f"{v} one." for k, v in extra.items()}},
        {"role": "user", "content": "Question two?"},
        {"role": "assistant", "content": "Answer two.", **{k: f"{v} two." for k, v in extra.items()}},
    ]


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


PLACE = {"place": "Lisbon harbour"}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": "Rule one."}, *_turns()[:2]],
    "turns": _turns(),
    "call-object": _tools(PLACE, "Let me see."),
    "call-text": _tools('{"place": "Lisbon harbour"}', ""),
    "call-null": _tools(PLACE, None),
    "reasoning": _turns(reasoning_content="Thought"),
    "parts": _parts(_turns()),
    "results": [
        {"role": "user", "content": "Question one?"},
        {"role": "assistant", "content": None, "tool_calls": [_call(1, PLACE), _call(2, {"place": "Porto bridge"})]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": "Result one"},
        {"role": "tool", "tool_call_id": "call00002", "name": "look_up", "content": "Result two"},
        {"role": "assistant", "content": "Answer one."},
    ],
    "continued": [*_turns()[:2], {"role": "assistant", "content": "Answer more."}],
}


@dataclass(frozen=True)
class Outcome:
    """word: exact, warned (a text is lost, and said so), refused (with `detail`), or WRONG (with `detail`)."""

    word: str
    detail: str = ""
    shown: str = ""


def sweep(tokenizer: Any) -> dict[str, Outcome]:
    """Every shape through the tokenizer's template."""
    renderer = ChatRenderer(tokenizer, apply_chat_template=True)
    return {name: outcome(renderer, messages) for name, messages in SHAPES.items()}


def outcome(renderer: ChatRenderer, given: list[dict[str, Any]]) -> Outcome:
    """One conversation, all assistant turns trained on."""
    tools = [TOOL] if any(m.get("tool_calls") for m in given) else None
    try:
        messages = renderer.messages(given)
        texts = conversation_segments(renderer, messages, tools, every_turn=True)
        renderer.check(messages, tools, *written(texts))
    except PromptError as error:
        return Outcome("refused", str(error))
    lost = {entry.text for entry in renderer.lost}
    tokenizer = renderer.tokenizer
    spans = [segment.text for segments in texts for segment in segments if segment.trained]
    shown = "\n---\n".join("".join(f"⟦{s.text}⟧" if s.trained else s.text for s in segments) for segments in texts)
    rows = [SegmentTokenizer(tokenizer).row(segments) for segments in texts]
    tokens = [t for row in rows for t, trained in zip(row.tokens, row.mask, strict=True) if trained]
    if tokenizer.decode(tokens) != "".join(spans):
        return Outcome("WRONG", "the trained tokens are not the trained texts", shown)
    detail = _wrong(given, spans, lost, tokenizer)
    return Outcome("WRONG", detail, shown) if detail else Outcome("warned" if lost else "exact", shown=shown)


def _wrong(given: list[dict[str, Any]], spans: list[str], lost: set[str], tokenizer: Any) -> str:
    """What is wrong with the trained texts; "" when nothing is."""
    turns = [m for m in given if m["role"] == "assistant"]
    others = [t for m in given if m["role"] != "assistant" for t in _texts_of(m)]
    if len(spans) != len(turns):
        return f"{len(spans)} texts trained for {len(turns)} turns"
    for turn, span in zip(turns, spans, strict=True):
        ends = [t for t in tokenizer.all_special_tokens if span.endswith(t)]
        if not ends:
            return f"no end: {span!r}"
        for text in _texts_of(turn):
            if text not in span and text not in lost:
                return f"{text!r} is not trained on: {span!r}"
        theirs = [t for t in [*others, *(t for m in turns if m is not turn for t in _texts_of(m))] if t in span]
        theirs = [t for t in theirs if t not in _texts_of(turn)]
        if theirs:
            return f"{theirs} trained on as well: {span!r}"
        if "None" in span or "'type'" in span:
            return f"a Python value is trained on: {span!r}"
    return ""


def _texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    texts = [p["text"] for p in content] if isinstance(content, list) else [content] if content else []
    texts += [message["reasoning_content"]] if "reasoning_content" in message else []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        texts += ["look_up", "place", "Porto bridge" if "Porto" in str(arguments) else "Lisbon harbour"]
    return texts
