"""Supervised examples as tokens with a loss mask, exact at every boundary.

A text comes in segments that are trained on or not, and each segment is tokenised on its own: a prompt has the same
ids as at inference, an answer those that the model would have to produce, and no token belongs to both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat.template import REASONING_KEYS, PromptError, text_of
from openrlhf.launcher.data.chat import ChatRenderer, valid_unicode
from openrlhf.launcher.data.turns import EndKind, common


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
    """A piece of text that is trained on or not. message: number of the message in a conversation that it is."""

    text: str
    trained: bool
    message: int | None = None


def written(texts: Iterable[Sequence[Segment]]) -> tuple[list[str], dict[int, str]]:
    """(every text, message -> its own text) of the messages that are trained on."""
    texts = list(texts)
    own = {s.message: s.text for segments in texts for s in segments if s.message is not None}
    return ["".join(s.text for s in segments) for segments in texts], own


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

    One text, unless the chat template writes an earlier turn differently once later ones follow (drops its reasoning,
    say, or its end): such a turn is trained on in a text of its own that ends with it, as the model saw it when it had
    to answer. A turn is trained on from the end of the generation prompt to the token that ends it (see `turns`); what
    the template writes after that (a line end) is not.

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
        text = renderer.chat.write(messages[: todo[-1] + 1], tools, answer_next=False)
        found = {i: span for i in todo if (span := _span(renderer, messages[: i + 1], tools, text)) is not None}
        if todo[-1] not in found:
            text, found = _behind_prompt(renderer, messages[: todo[-1] + 1], tools, text)
        texts.append(_cut_at(valid_unicode(text), found))
        todo = [i for i in todo if i not in found]
    return texts[::-1]


@dataclass(frozen=True)
class _Span:
    """Where a turn stands in a text, its end token included. added: the end token where the text has none."""

    start: int
    stop: int
    added: str = ""


def _span(renderer: ChatRenderer, upto: Sequence[dict[str, Any]], tools: Any, text: str) -> _Span | None:
    """Where the last message of `upto` stands in `text`; None when it stands there in another way or without end."""
    short = renderer.chat.write(upto, tools, answer_next=False)
    start = _start(renderer, upto[:-1], tools, short)
    if start is None:
        return None
    stop, added = _stop(renderer, upto[-1], short, start)
    if text[:stop] != short[:stop]:
        return None
    if not added:
        return _Span(start, stop)
    marker = renderer.special_at(text, stop)
    if renderer.ends.marks_next(upto[-1]) and marker is not None:
        return _Span(start, marker)
    return _Span(start, stop, added) if not text[stop:].strip() else None


def _start(renderer: ChatRenderer, before: Sequence[dict[str, Any]], tools: Any, short: str) -> int | None:
    """Where the answer to the messages `before` begins in the text that ends with it; None where that is not clear."""
    opened = renderer.chat.write(before, tools, answer_next=True)
    start = common(opened, short)
    header = renderer.ends.header
    closed = renderer.chat.write(before, tools, answer_next=False)
    if header is None:  # a conversation begins an answer with something else than the generation prompt
        return start if start == len(opened) != len(closed) else None
    if start == len(opened):
        # Some templates ask for an answer only behind a user's message: what stands before it is skipped here.
        skipped = len(short) - len(short[start:].lstrip())
        return skipped + len(header) if header.strip() and short.startswith(header, skipped) else start
    # The generation prompt holds what the conversation does not (an opened <think>), or the question is written anew.
    starts = [common(closed, short)]
    if renderer.without_special(closed[starts[0] :]).strip():  # else an answer that goes on from the one before it
        starts = [max(renderer.last_special(short[:start]), short.rfind("\n", 0, start) + 1)]
        starts = starts if starts[0] >= common(closed, short) >= len(closed.rstrip()) else []
    if header.strip() and (at := short.rfind(header)) >= 0:
        starts.insert(0, at + len(header))
    return next((s for s in starts if _stands_before(before[-1:], short, s)), None)


def _stands_before(messages: Sequence[Mapping[str, Any]], text: str, start: int) -> bool:
    """Whether the texts of these messages stand before `start`, not behind it."""
    contents = [text_of(m["content"]).strip() for m in messages]
    return not any(c and c in text[start:] and c not in text[:start] for c in contents)


def _behind_prompt(
    renderer: ChatRenderer, upto: Sequence[dict[str, Any]], tools: Any, short: str
) -> tuple[str, dict[int, _Span]]:
    """The last message behind the generation prompt itself, where the template writes the question anew with an answer.

    Only for an answer of nothing but text, in front of which stands what the generation prompt ends with. PromptError
    for any other.
    """
    opened, closed = (renderer.chat.write(upto[:-1], tools, answer_next=n) for n in (True, False))
    message = upto[-1]
    content = text_of(message["content"]).strip()
    at = short.rfind(content) if content and not message.get("tool_calls") else -1
    stop, added = _stop(renderer, message, short, max(at, 0))
    asked = opened[common(opened, closed) :].strip()
    plain = not any(message.get(key) for key in REASONING_KEYS)
    behind = renderer.without_special(short[at + len(content) : stop]).strip()
    if at < 0 or not plain or behind or not short[:at].rstrip().endswith(asked):
        raise PromptError(
            f"message {len(upto) - 1}: the chat template begins it in another way when the answer is there than when "
            "it asks for one (add_generation_prompt), so what to train on is not known; give a template that "
            "writes both alike with --data.tokenizer_chat_template"
        )
    blanks = short[len(short[:at].rstrip()) : at] if opened == opened.rstrip() else ""
    text = opened + blanks + short[at:stop]
    return text, {len(upto) - 1: _Span(len(opened), len(text), added)}


def _stop(renderer: ChatRenderer, message: Mapping[str, Any], short: str, start: int) -> tuple[int, str]:
    """Where the turn that ends the text `short` stops, and the end token to add where none is written.

    The token is the one that the template is known to write; in a conversation of another kind, the last special one.
    """
    end = renderer.ends.of(message)
    if end is not None and end.kind in (EndKind.INSIDE, EndKind.LAST):
        at = short.rfind(end.token, start)
        if at >= 0:
            return at + len(end.token), ""
    if end is not None and end.kind is EndKind.NEXT:
        return len(short), end.token
    special = renderer.last_special(short[start:])
    if special and not short[start + special :].strip():
        return start + special, ""
    return len(short), renderer.tokenizer.eos_token or ""


def _cut_at(text: str, spans: Mapping[int, _Span]) -> list[Segment]:
    segments: list[Segment] = []
    at = 0
    for message, span in sorted(spans.items()):
        answer = text[span.start : span.stop] + span.added
        segments += [Segment(text[at : span.start], False), Segment(answer, True, message)]
        at = span.stop
    return segments  # what follows the last answer is read by nobody
