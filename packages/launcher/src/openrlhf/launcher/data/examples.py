"""Supervised examples as tokens with a loss mask, exact at every boundary.

A text comes in segments that are trained on or not, and each segment is tokenised on its own: a prompt has the same
ids as at inference, an answer those that the model would have to produce, and no token belongs to both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.launcher.data.chat import ChatRenderer, PromptError, valid_unicode


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One sequence. mask: True on the tokens that are trained on; the first token never is."""

    tokens: list[int]
    mask: list[bool]

    @property
    def trains(self) -> bool:
        """Whether any token is trained on."""
        return any(self.mask)

    def cut(self, max_len: int) -> TokenRow:
        """The first `max_len` tokens. A cut answer gets no end-of-sequence token: it did not end there."""
        return TokenRow(tokens=self.tokens[:max_len], mask=self.mask[:max_len])


@dataclass(frozen=True)
class Segment:
    """A piece of text that is trained on or not."""

    text: str
    trained: bool


class SegmentTokenizer:
    """Segments -> TokenRow."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchor = ""
        eos = tokenizer.eos_token
        # Tokenizers of the SentencePiece kind put a space before the first word of a text. A later segment is no such
        # start: it is tokenised behind a special token, whose id is then taken off.
        if eos and self._ids([eos + "a"])[0][1:] != self._ids(["a"])[0]:
            self._anchor = eos

    def row(self, segments: Iterable[Segment]) -> TokenRow:
        """The segments one after the other. The first token of all is not trained on: nothing predicts it."""
        kept = [s for s in segments if s.text]
        ids = self._ids([s.text if i == 0 else self._anchor + s.text for i, s in enumerate(kept)])
        tokens: list[int] = []
        mask: list[bool] = []
        for i, (segment, part) in enumerate(zip(kept, ids, strict=True)):
            part = part[1:] if i and self._anchor else part
            tokens += part
            mask += [segment.trained] * len(part)
        return TokenRow(tokens=tokens, mask=[False, *mask[1:]] if mask else [])

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def plain_segments(renderer: ChatRenderer, prompt: Any, answer: Any) -> list[Segment]:
    """A prompt through the input template and its answer, which ends with the end-of-sequence token."""
    return [Segment(renderer.render(prompt), False), Segment(ended(renderer, renderer.text(answer)), True)]


def ended(renderer: ChatRenderer, text: str) -> str:
    """The text with the end-of-sequence token behind it, once."""
    eos = renderer.tokenizer.eos_token or ""
    return text if eos and text.endswith(eos) else text + eos


def conversation_segments(
    renderer: ChatRenderer, messages: Sequence[dict[str, Any]], tools: Any, *, every_turn: bool
) -> list[list[Segment]]:
    """The texts of a conversation with the assistant's turns (every_turn; else the last one) trained on.

    One text, unless the chat template rewrites earlier turns once later ones follow (drops their reasoning, say): such
    a turn is trained on in a text of its own that ends with it, as the model saw it when it had to answer. A turn is
    trained on from the end of the generation prompt to its last special token; what the template writes after that
    (a line end) is not. A last turn that ends with no special token gets the end-of-sequence token.

    Raises PromptError: no assistant turn to train on, or one that cannot be found in what the template writes.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns or (not every_turn and turns[-1] != len(messages) - 1):
        last = messages[-1]["role"]
        what = "an assistant turn" if every_turn else "the last message to be the assistant's answer"
        raise PromptError(f"expected {what}, the last role is {last!r}")
    todo = turns if every_turn else turns[-1:]
    texts: list[list[Segment]] = []
    while todo:
        text = renderer.template(messages[: todo[-1] + 1], tools, answer_next=False)
        spans = {i: span for i in todo if (span := _span(renderer, messages[: i + 1], tools, text)) is not None}
        if todo[-1] not in spans:
            raise PromptError(f"message {todo[-1]}: the chat template writes its beginning differently with an answer")
        texts.append(_cut_at(renderer, valid_unicode(text), sorted(spans.values())))
        todo = [i for i in todo if i not in spans]
    return texts[::-1]


def _span(renderer: ChatRenderer, upto: Sequence[dict[str, Any]], tools: Any, text: str) -> tuple[int, int] | None:
    """Where the last message of `upto` stands in `text`; None when the text is not a continuation of it."""
    eos = renderer.tokenizer.eos_token or ""
    short = renderer.template(upto, tools, answer_next=False)
    if not text.startswith(short):  # some templates close every text, not every turn, with the end token
        short = short.rstrip().removesuffix(eos) if eos else short
    if not text.startswith(short):
        return None
    end = len(short)
    opened = renderer.template(upto[:-1], tools, answer_next=True)
    start = _common(opened, text)
    if start < len(opened):  # the generation prompt holds what the conversation does not, such as an opened <think>
        start = max(renderer.last_special(text[:start]), text.rfind("\n", 0, start) + 1)
        if start < _common(renderer.template(upto[:-1], tools, answer_next=False), text):
            return None
    if start > end:
        return None
    special = renderer.last_special(text[start:end])
    if special and not text[start + special : end].strip():
        end = start + special
    return start, end


def _cut_at(renderer: ChatRenderer, text: str, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    segments: list[Segment] = []
    at = 0
    for start, end in spans:
        segments += [Segment(text[at:start], False), Segment(text[start:end], True)]
        at = end
    if not text[at:].strip() and renderer.last_special(text[:at]) != at:
        segments.append(Segment(renderer.tokenizer.eos_token or "", True))
    return segments  # what follows the last answer is read by nobody


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
