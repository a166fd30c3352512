"""What a row means to a supervised trainer: the texts of an instruction, or the two answers of a preference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from openrlhf.agents.chat.template import PromptError
from openrlhf.launcher.data.chat import ChatRenderer
from openrlhf.launcher.data.examples import (
    Segment,
    SegmentTokenizer,
    TokenRow,
    conversation_segments,
    ended,
    plain_segments,
    written,
)
from openrlhf.launcher.data.messages import joined, parsed, row_tools, same_messages
from openrlhf.launcher.data.rows import Row, has_key, lookup

NO_ANSWER = "no token of the answer within --data.max_len"
SAME_ANSWERS = "chosen and rejected are the same within --data.max_len"


class DroppedRow(Exception):  # noqa: N818 (no error: the row is counted and left out)
    """A row that trains nothing; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is trained on together: one sequence, or the chosen and the rejected one of a pair."""

    rows: tuple[TokenRow, ...]
    margin: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class SftReader:
    """Rows of instructions.

    multiturn: train on every assistant turn, else on the last. pretrain: train on every token of the input field, as
    it stands. output_key None: the input field holds the whole conversation.
    """

    rows_per_unit: ClassVar[int] = 1

    renderer: ChatRenderer
    input_key: str
    output_key: str | None
    max_len: int
    multiturn: bool = False
    pretrain: bool = False

    @cached_property
    def _tokenize(self) -> SegmentTokenizer:
        return SegmentTokenizer(self.renderer.tokenizer)

    @property
    def fields(self) -> list[tuple[str, str]]:
        """(flag, key) of the fields that some row must have."""
        return sft_fields(self.input_key, self.output_key)

    def read(self, row: Row) -> list[Unit]:
        """The sequences of a row: one, or several where the chat template rewrites earlier turns.

        Raises PromptError for a row that makes no sense, DroppedRow for one that is too long.
        """
        texts = [self._tokenize.row(segments).cut(self.max_len) for segments in self._segments(row)]
        kept = [Unit(rows=(text,)) for text in texts if text.trains]
        if not kept:
            raise DroppedRow(NO_ANSWER)
        return kept

    def _segments(self, row: Row) -> list[list[Segment]]:
        value = field(row, self.input_key)
        output = None if self.output_key is None else field(row, self.output_key)
        if self.pretrain:
            text = self.renderer.plain(value) + ("" if output is None else self.renderer.text(output))
            return [[Segment(ended(self.renderer, text), True)]]
        if not self.renderer.apply_chat_template:
            return [plain_segments(self.renderer, value, output)]
        messages = self.renderer.messages(value)
        if output is not None:
            messages = joined(messages, answer_messages(self.renderer, output))
        tools = row_tools(row)
        texts = conversation_segments(self.renderer, messages, tools, every_turn=self.multiturn)
        self.renderer.check(messages, tools, *written(texts))
        return texts


@dataclass(frozen=True, kw_only=True)
class PairReader:
    """Rows of preferences: a chosen and a rejected answer, with or without the prompt in a field of its own.

    margins: read the field `margin` (a number, or null for 0).
    """

    rows_per_unit: ClassVar[int] = 2

    renderer: ChatRenderer
    prompt_key: str | None
    chosen_key: str
    rejected_key: str
    max_len: int
    margins: bool = False

    @cached_property
    def _tokenize(self) -> SegmentTokenizer:
        return SegmentTokenizer(self.renderer.tokenizer)

    @property
    def fields(self) -> list[tuple[str, str]]:
        """(flag, key) of the fields that some row must have."""
        return pair_fields(self.prompt_key, self.chosen_key, self.rejected_key, margins=self.margins)

    def read(self, row: Row) -> list[Unit]:
        """The pair of a row. Raises PromptError for a row that makes no sense, DroppedRow for one without a choice."""
        chosen, rejected = (answer.cut(self.max_len) for answer in self._answers(row))
        if chosen.tokens == rejected.tokens:
            raise DroppedRow(SAME_ANSWERS)
        if not (chosen.trains and rejected.trains):
            raise DroppedRow(NO_ANSWER)
        return [Unit(rows=(chosen, rejected), margin=self._margin(row))]

    def _answers(self, row: Row) -> tuple[TokenRow, TokenRow]:
        prompt = None if self.prompt_key is None else field(row, self.prompt_key)
        values = field(row, self.chosen_key), field(row, self.rejected_key)
        if self.renderer.apply_chat_template:
            return self._conversations(row, prompt, values)
        if prompt is not None:
            chosen, rejected = (self._tokenize.row(plain_segments(self.renderer, prompt, v)) for v in values)
            return chosen, rejected
        return after_common_start(*(self._whole(value) for value in values))

    def _whole(self, value: Any) -> TokenRow:
        return self._tokenize.row([Segment(ended(self.renderer, self.renderer.plain(value)), True)])

    def _conversations(self, row: Row, prompt: Any, values: tuple[Any, Any]) -> tuple[TokenRow, TokenRow]:
        chosen, rejected = (self._messages(prompt, value) for value in values)
        if same_messages(chosen[:-1], rejected[:-1]):
            rejected = [*chosen[:-1], rejected[-1]]  # the prompts may differ by blanks: one of them is for both
        else:
            pairs = enumerate(zip(chosen, rejected, strict=False))
            turn = next((i for i, (a, b) in pairs if not same_messages([a], [b])), len(chosen[:-1]))
            raise PromptError(
                f"expected chosen and rejected to share every message but the last, they differ in message {turn}"
            )
        tools = row_tools(row)
        self.renderer.lost = []
        both = [conversation_segments(self.renderer, m, tools, every_turn=False)[0] for m in (chosen, rejected)]
        for messages, segments in zip((chosen, rejected), both, strict=True):
            lost = self.renderer.lost
            self.renderer.check(messages, tools, *written([segments]))
            self.renderer.lost = lost + self.renderer.lost
        first, second = (self._tokenize.row(segments) for segments in both)
        return first, second

    def _messages(self, prompt: Any, value: Any) -> list[dict[str, Any]]:
        """The whole conversation; an answer that repeats the prompt's messages is one already."""
        before = [] if prompt is None else self.renderer.messages(prompt)
        answer = answer_messages(self.renderer, value)
        if not before and isinstance(parsed(value), str):
            raise PromptError(
                f"expected a list of messages, got a text: {value!r:.80}; add --data.prompt_key, or leave "
                "--data.apply_chat_template out"
            )
        return joined(before, answer)

    def _margin(self, row: Row) -> float:
        if not self.margins:
            return 0.0
        margin = lookup(row, "margin")
        if margin is None:
            return 0.0
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise PromptError(f"expected a number in field 'margin', got {margin!r:.80}")
        return float(margin)


UnitReader = SftReader | PairReader


def field(row: Row, key: str) -> Any:
    """The value of a field. PromptError where it is missing or null."""
    if not has_key(row, key):
        raise PromptError(f"expected a field {key!r}, the row has {', '.join(row)}")
    value = lookup(row, key)
    if value is None:
        raise PromptError(f"expected a text or messages in field {key!r}, got null")
    return value


def answer_messages(renderer: ChatRenderer, value: Any) -> list[dict[str, Any]]:
    """An answer as messages: a string is one message of the assistant."""
    value = parsed(value)
    return renderer.messages([{"role": "assistant", "content": value}] if isinstance(value, str) else value)


def after_common_start(chosen: TokenRow, rejected: TokenRow) -> tuple[TokenRow, TokenRow]:
    """Two whole texts: what they share at the start is the prompt, and is not trained on."""
    pairs = zip(chosen.tokens, rejected.tokens, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen.tokens), len(rejected.tokens)))

    def unmask(row: TokenRow) -> TokenRow:
        return TokenRow(tokens=row.tokens, mask=[m and i >= shared for i, m in enumerate(row.mask)])

    return unmask(chosen), unmask(rejected)


def sft_fields(input_key: str, output_key: str | None) -> list[tuple[str, str]]:
    """(flag, key) of the fields of instructions."""
    output = [] if output_key is None else [("--data.output_key", output_key)]
    return [("--data.input_key", input_key), *output]


def pair_fields(prompt_key: str | None, chosen_key: str, rejected_key: str, *, margins: bool) -> list[tuple[str, str]]:
    """(flag, key) of the fields of preferences."""
    prompt = [] if prompt_key is None else [("--data.prompt_key", prompt_key)]
    margin = [("--model.margin_loss_enable needs the field", "margin")] if margins else []
    return [*prompt, ("--data.chosen_key", chosen_key), ("--data.rejected_key", rejected_key), *margin]
