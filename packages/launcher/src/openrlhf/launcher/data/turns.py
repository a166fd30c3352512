"""What ends an assistant's turn in a chat template: the token that has to be trained, and at which an engine stops.

Templates differ: most write a token behind every turn; some write one only at the end of a conversation, or another
one there than inside it; in some the next role's marker is the end; some write nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from openrlhf.agents.chat.template import PROBE_CALL, PROBE_NAME, PROBE_TOOL, PROBE_VALUE, ChatTemplate, PromptError

_TAG = re.compile(r"</?[^<>\s]*think[^<>\s]*>|\[/?THINK\]", re.IGNORECASE)
_THINKING = re.compile(r"<[^<>\s]*think|\[THINK", re.IGNORECASE)
ANSWER, FOLLOW = "openrlhf-answer", "openrlhf-follow"


class EndKind(Enum):
    """Where the end of a turn is written."""

    INSIDE = "behind the turn, whatever follows"
    LAST = "behind the last turn only; inside a conversation there is another end or none"
    NEXT = "where something follows: the marker of the next role, or an end that the last turn lacks"
    NONE = "nowhere: the end-of-sequence token has to be added"


@dataclass(frozen=True)
class TurnEnd:
    """How a turn ends. token: its text (with the blanks before it, where it is NEXT); "" where nothing is written."""

    kind: EndKind
    token: str = ""


class TurnEnds:
    """The ends of answers and of tool calls. special: matches special tokens in a text; None when there are none."""

    def __init__(self, template: ChatTemplate, special: re.Pattern[str] | None) -> None:
        self._template = template
        self._special = special
        self._known: dict[bool, TurnEnd | None] = {}

    def of(self, message: Mapping[str, Any]) -> TurnEnd | None:
        """The end of this assistant's message; None where the template refuses a conversation that would show it."""
        return self._end(bool(message.get("tool_calls")))

    @cached_property
    def header(self) -> str | None:
        """What the template writes in front of an answer, in a generation prompt and in a conversation alike.

        Without the tags of an empty reasoning, in whose place some answers have one. None where the two differ in more
        than such tags; "" where the template writes nothing, or refuses the conversation that would show it.
        """
        template = self._template
        answer = {"role": "assistant", "content": ANSWER}
        try:
            closed, opened = (template.write([template.question], None, answer_next=n) for n in (False, True))
            whole = template.write([template.question, answer], None, answer_next=False)
        except PromptError:
            return ""
        base = common(closed, opened)
        if whole[:base] != closed[:base] or opened == closed:
            return ""
        header = opened[base : base + common(opened[base:], whole[base:])]
        rest = whole[base + len(header) :].partition(ANSWER)[0]
        if _TAG.sub("", rest).strip() and _THINKING.search(header) is None:
            return None
        return _THINKING.split(header)[0]

    def marks_next(self, message: Mapping[str, Any]) -> bool:
        """Whether the marker of the next role ends this assistant's message."""
        end = self.of(message)
        return end is not None and end.kind is EndKind.NEXT

    def tokens(self) -> list[str]:
        """Every end that the template writes, of answers first."""
        ends = [self._end(False), self._end(True) if self._template.calls.writes else None]
        return list(dict.fromkeys(end.token.strip() for end in ends if end is not None and end.token))

    def _end(self, calls: bool) -> TurnEnd | None:
        if calls not in self._known:
            try:
                self._known[calls] = self._probe(calls)
            except PromptError:
                self._known[calls] = None
        return self._known[calls]

    def _probe(self, calls: bool) -> TurnEnd | None:
        if self._special is None:
            return TurnEnd(EndKind.NONE)
        template = self._template
        if calls:
            turn = template.call("object", None)
            follow = {"role": "tool", "name": PROBE_NAME, "tool_call_id": PROBE_CALL["id"], "content": FOLLOW}
        else:
            turn = {"role": "assistant", "content": ANSWER}
            follow = {"role": "user", "content": FOLLOW}
        tools = [PROBE_TOOL] if calls else None
        last = _behind(template.write([template.question, turn], tools, answer_next=False), calls)
        longer = template.write([template.question, turn, follow], tools, answer_next=False)
        inner = _behind(longer.partition(FOLLOW)[0], calls)
        return None if last is None or inner is None else self._compare(last, inner, calls)

    def _compare(self, last: str, inner: str, calls: bool) -> TurnEnd:
        """last, inner: what stands behind a turn at the end of a conversation, and inside one up to the next text."""
        assert self._special is not None
        answers = self._end(False) if calls else None
        shared = next(
            (i for i, (a, b) in enumerate(zip(last, inner, strict=False)) if a != b), min(len(last), len(inner))
        )
        both = _found(self._special, last[:shared])
        if answers is not None and answers.kind is EndKind.NEXT:
            after = _found(self._special, inner[shared:])
            return TurnEnd(EndKind.NEXT, after[0]) if after else TurnEnd(EndKind.NONE)
        if both:  # behind a call the brackets of the call may be special too
            usual = answers.token if answers is not None and answers.token in both else None
            return TurnEnd(EndKind.INSIDE, usual or both[-1 if calls else 0])
        only_last = _found(self._special, last)
        if only_last and last.rstrip().endswith(only_last[-1]):
            return TurnEnd(EndKind.LAST, only_last[-1])
        blanks = len(inner) - len(inner.lstrip())
        after = self._special.match(inner, blanks)
        return TurnEnd(EndKind.NEXT, inner[: after.end()]) if after is not None else TurnEnd(EndKind.NONE)


def common(a: str, b: str) -> int:
    """Length of the common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def stop_token_ids(tokenizer: Any, ends: TurnEnds) -> tuple[int, ...]:
    """Ids of the tokens that end a turn and are not the tokenizer's end-of-sequence token, which stops anyway."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ends.tokens()]
    return tuple(i for i in ids if i is not None and i not in (tokenizer.eos_token_id, tokenizer.unk_token_id))


def _behind(text: str, calls: bool) -> str | None:
    """What stands behind the turn's own last text; None where it is not there."""
    anchor = PROBE_VALUE if calls and PROBE_VALUE in text else PROBE_NAME if calls else ANSWER
    return text[text.rfind(anchor) + len(anchor) :] if anchor in text else None


def _found(special: re.Pattern[str], text: str) -> list[str]:
    return [m[0] for m in special.finditer(text)]
