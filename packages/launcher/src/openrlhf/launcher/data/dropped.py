"""Whether everything that the messages of a row hold is in the text that the chat template wrote of them.

Looked for by content: every text of a message, its reasoning, the names and the texts in the arguments of its tool
calls, and the names of the offered tools. Templates may strip, break lines anew, escape as JSON and move what stands
before `</think>`; the words themselves have to be there.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat.template import REASONING_KEYS, ChatTemplate, PromptError
from openrlhf.launcher.data.messages import KNOWN_ROLES

log = logging.getLogger(__name__)

WARN, ERROR = "warn", "error"
_TAGS = re.compile(r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<image>|<\|[^|<>\s]+\|>|\u200b")
"""What a template may take as a mark of its own: it stands between texts that are looked for."""
_PART_TEXTS = ("text", "thinking", "refusal", "input_text", "output_text")


@dataclass(frozen=True)
class Lost:
    """A text of a row that is not in what is tokenised. where: such as "message 2 (assistant), reasoning_content"."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text if len(self.text) <= 60 else self.text[:57] + '...'!r}"


def lost_texts(
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    written: Sequence[str],
    own: Mapping[int, str],
    template: ChatTemplate,
) -> list[Lost]:
    """The texts that are in none of `written`, and those of roles whose content the template leaves out.

    own: message -> the text that it has to be found in, of messages that are trained on.
    Raises PromptError where a tool call is lost, or a whole message of a role that the template does not know.
    """
    everything = _Page("\n".join(written))
    lost: list[Lost] = []
    for number, message in enumerate(messages):
        page = _Page(own[number]) if number in own else everything
        _check_calls(number, message, page)
        dropped = template.drops(message["role"])
        if number in own and not _any_text(message, page):
            raise PromptError(f"message {number}: the chat template writes nothing of the assistant's turn")
        for key, text in _texts(message):
            if page.holds(text) and not (dropped and key == "content" and text.strip()):
                continue
            if message["role"] not in KNOWN_ROLES:
                known = ", ".join(KNOWN_ROLES)
                raise PromptError(f"message {number}: the chat template drops role {message['role']!r}; use {known}")
            lost.append(Lost(f"message {number} ({message['role']}), {key}", text))
    return [*lost, *(Lost("tools", name) for name in _tool_names(tools) if not everything.holds(name))]


def _any_text(message: Mapping[str, Any], page: _Page) -> bool:
    """Whether some text of the message is there, or it has none."""
    texts = [text for _, text in (*_texts(message), *_call_texts(message)) if text.strip()]
    return not texts or any(page.holds(piece) for text in texts for piece in _TAGS.split(text) if piece.strip())


def _check_calls(number: int, message: Mapping[str, Any], page: _Page) -> None:
    for key, text in _call_texts(message):
        if not page.holds(text):
            raise PromptError(
                f"message {number}: the chat template does not write its tool calls ({key} {text!r:.60} is lost); "
                "use a template that does, or drop such rows"
            )


class DroppedText:
    """Counts the rows of which a text is lost; policy "error": the first one ends the run.

    flag: the data set's. remedy: what to do about it. Example::

        tally = DroppedText("--data.dataset", "warn", remedy="use another template")
        tally.add("a.jsonl, line 3", lost_texts(messages, None, [text], template))
        tally.report(of=1000)
    """

    def __init__(self, flag: str, policy: str, *, remedy: str) -> None:
        self.flag = flag
        self._policy = policy
        self._remedy = remedy
        self._first = ""
        self.rows = 0

    def add(self, place: str, lost: Sequence[Lost]) -> None:
        """A row and what it lost. Raises PromptError under "error"."""
        if lost:
            self.count(1, place, lost[0])

    def refuse(self, lost: Lost | str) -> None:
        """Raises PromptError under "error"."""
        if self._policy == ERROR:
            raise PromptError(f"the chat template drops {lost}; {self._remedy}, or --data.dropped_text {WARN}")

    def count(self, rows: int, place: str, lost: Lost | str) -> None:
        """So many rows, the first of which lost this. Raises PromptError under "error"."""
        self.refuse(lost)
        self.rows += rows
        self._first = self._first or f"{place}, {lost}"

    def report(self, *, of: int) -> None:
        """One warning with the share of rows and the first of them, if there is any."""
        if self.rows:
            log.warning(
                "%s: the chat template drops a text of %d of %d rows (%.1f%%), first in %s; %s, or make it an error "
                "with --data.dropped_text %s",
                self.flag, self.rows, of, 100 * self.rows / of, self._first, self._remedy, ERROR,
            )  # fmt: skip


class _Page:
    """What was written, searched without regard to blanks and to escaping."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._squeezed: str | None = None

    def holds(self, text: str) -> bool:
        """Whether every word of the text is there, in its order between marks."""
        if text.strip() in self._text:
            return True
        if self._squeezed is None:
            self._squeezed = _squeeze(self._text)
        return all(self._holds(piece) for piece in _TAGS.split(text))

    def _holds(self, piece: str) -> bool:
        assert self._squeezed is not None
        forms = (piece, json.dumps(piece)[1:-1], json.dumps(piece, ensure_ascii=False)[1:-1])
        return any(_squeeze(form) in self._squeezed for form in forms)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    content = message["content"]
    for part in [{"text": content}] if isinstance(content, str) else content or []:
        for key in _PART_TEXTS:
            if isinstance(part.get(key), str):
                yield "content", part[key]
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            yield key, message[key]


def _call_texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for call in message.get("tool_calls") or ():
        function = call["function"]
        yield "name", function["name"]
        arguments = function["arguments"]
        for text in _strings(json.loads(arguments) if isinstance(arguments, str) else arguments):
            yield "argument", text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _tool_names(tools: Any) -> Iterator[str]:
    for tool in tools if isinstance(tools, list) else ():
        described = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(described, Mapping) and isinstance(described.get("name"), str):
            yield described["name"]
