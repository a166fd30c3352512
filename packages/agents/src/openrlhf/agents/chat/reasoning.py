"""Tells reasoning from answer in what the model wrote: tool calls count in the answer only."""

from __future__ import annotations

import re

PAIRS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
}
_TAG = re.compile("|".join(re.escape(tag) for pair in PAIRS.items() for tag in pair))


def opened(prompt: str, prefill: str = "") -> str | None:
    """The tag that will close the reasoning in which the model starts: its prompt ends with the opening one, or the
    beginning of its answer (prefill) holds one that is not closed."""
    tail = prompt.rstrip()
    for opening, closing in PAIRS.items():
        if tail.endswith(opening) or prefill.rfind(opening) > prefill.rfind(closing):
            return closing
    return None


def split_reasoning(text: str, closing: str | None = None) -> list[tuple[bool, str]]:
    """The text in order as (is reasoning, part). closing: of the reasoning in which the text begins, see `opened`.

    A text whose first tag closes began in reasoning. An opening tag opens if it is closed later, or begins the text;
    else it is talked about. Reasoning that is not closed was cut off and goes to the end.
    """
    tags = list(_TAG.finditer(text))
    last = {tag.group(): tag.start() for tag in tags}
    if closing is None and tags and tags[0].group() in PAIRS.values():
        closing = tags[0].group()
    parts: list[tuple[bool, str]] = []
    start = 0
    for tag in tags:
        if closing is not None:
            if tag.group() == closing:
                parts.append((True, text[start : tag.end()]))
                start, closing = tag.end(), None
        elif tag.group() in PAIRS:
            expected = PAIRS[tag.group()]
            if last.get(expected, -1) > tag.start() or not text[: tag.start()].strip():
                parts.append((False, text[start : tag.start()]))
                start, closing = tag.start(), expected
    parts.append((closing is not None, text[start:]))
    return [part for part in parts if part[1]]


def untagged(part: str) -> str:
    """A part of reasoning without its tags and the blanks beside them."""
    part = part.strip()
    for opening, closing in PAIRS.items():
        part = part.removeprefix(opening).removesuffix(closing)
    return part.strip()
