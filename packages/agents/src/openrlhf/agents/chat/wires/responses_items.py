"""The items of OpenAI's Responses: input, and output that comes back as input, as messages of a chat template."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.chat.fields import bad_request, check_names, shown, text
from openrlhf.agents.chat.messages import Conversation, read_arguments
from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.wires.conversation import ConversationBuilder, seal, text_part

ROLES = ("user", "assistant", "system", "developer")
BOOKKEEPING = frozenset({"type", "id", "status"})
FIELDS: Mapping[str, frozenset[str]] = {
    "message": BOOKKEEPING | {"role", "content", "phase"},
    "function_call": BOOKKEEPING | {"call_id", "name", "arguments"},
    "function_call_output": BOOKKEEPING | {"call_id", "output", "name"},
    "reasoning": BOOKKEEPING | {"summary", "content", "encrypted_content"},
}
"""Items that are understood, and their fields."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "async": ((False,), "calls are answered in the next request"),
    "caller": (({"type": "direct"},), "the policy calls functions itself"),
    "namespace": ((), "functions have no namespaces here"),
}


def items_of(value: Any) -> list[Mapping[str, Any]]:
    """The items of `input`; a string is the message of a user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise bad_request(f"'input' must be a string or a list of items, got {shown(value)}", "input")
    return value


def read_items(
    instructions: str | None, before: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]], stored: Any,
    renderer: ChatRenderer,
) -> Conversation:  # fmt: skip
    """The conversation of earlier items and new ones. stored: the answers whose items may be referred to."""
    builder = ConversationBuilder(renderer)
    if instructions:
        builder.say("system", [{"type": "text", "text": instructions}], "instructions")
    reader = _Reader(builder)
    for item in before:
        reader.read(item, "previous_response_id")
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if item.get("type") == "item_reference" or (set(item) == {"id"}):
            item = _referred(item.get("id"), stored, f"{where}.id")
        reader.read(item, where)
    reader.flush()
    return builder.finish("input")


def _referred(name: Any, stored: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for answer in stored.values():
        for item in answer["items"]:
            if item.get("id") == name and name is not None:
                return item
    raise bad_request(f"{where} {shown(name)}: there is no such item", where)


class _Reader:
    """Puts what belongs to one message of the assistant (reasoning, text, calls) together."""

    def __init__(self, builder: ConversationBuilder) -> None:
        self._builder = builder
        self._reasoning = ""
        self._parts: list[dict[str, Any]] | None = None
        self._calls: list[dict[str, Any]] = []
        self._where = ""

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        if kind not in FIELDS:
            raise bad_request(f"{where}.type must be one of {', '.join(FIELDS)}, got {shown(kind)}", f"{where}.type")
        check_names(item, FIELDS[kind], REFUSED, f"{where}.")
        if kind == "reasoning":
            self.flush()
            self._reasoning, self._where = _reasoning(item, where), where
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self.flush()
            parts = self._content(item.get("output"), f"{where}.output", ("input_text", "input_image"))
            self._builder.result(item.get("call_id"), parts, where, "call_id")
        else:
            self._message(item, where)

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{where}.role")
        kinds = ("output_text", "input_text") if role == "assistant" else ("input_text", "input_image")
        parts = self._content(item.get("content"), f"{where}.content", kinds)
        if role == "assistant":
            if self._parts is not None or self._calls:
                self.flush()
            self._parts, self._where = parts, where
            return
        self.flush()
        self._builder.say("system" if role == "developer" else role, parts, where)

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise bad_request(f"{where}.arguments must be JSON text, got {shown(arguments)}", f"{where}.arguments")
        self._calls.append(
            self._builder.call(item.get("call_id"), item.get("name"), read_arguments(arguments, where), where)
        )
        self._where = where

    def flush(self) -> None:
        """Ends the assistant's message."""
        if self._reasoning or self._parts is not None or self._calls:
            self._builder.assistant(self._parts or [], self._reasoning, self._calls, self._where)
        self._reasoning, self._parts, self._calls = "", None, []

    def _content(self, content: Any, where: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise bad_request(f"{where} must be a string or a list of parts, got {shown(content)}", where)
        return [self._part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content)]

    def _part(self, part: Any, place: str, kinds: tuple[str, ...]) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds:
            raise bad_request(f"{place} must be a part of type {' or '.join(kinds)}, got {shown(part)}", place)
        if kind != "input_image":
            return text_part(part.get("text"), f"{place}.text")
        if part.get("detail") not in (None, "auto"):
            raise bad_request(f"{place}.detail is not supported: images are read in full", f"{place}.detail")
        if part.get("file_id") is not None:
            raise bad_request(f"{place}.file_id: there are no files here; give image_url", f"{place}.file_id")
        return self._builder.image(place, text(part.get("image_url"), f"{place}.image_url"))


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text of an item of reasoning: its content, or what was sealed into it."""
    content = item.get("content") or []
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise bad_request(f"{where}.content must be a list of parts", f"{where}.content")
    said = "".join(text(part.get("text"), f"{where}.content[{i}].text") for i, part in enumerate(content))
    sealed = item.get("encrypted_content")
    if sealed is None:
        return said
    opened = unsealed(text(sealed, f"{where}.encrypted_content"))
    if opened is None or (said and said != opened):
        place = f"{where}.encrypted_content"
        raise bad_request(f"{place} does not belong to this item: send it back as it came", place)
    return opened


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`. It is no secret, only told from what was changed."""
    return base64.b64encode(f"{seal(reasoning)}{reasoning}".encode()).decode()


def unsealed(value: str) -> str | None:
    """The reasoning in `encrypted_content`, None where it is not one of ours."""
    try:
        plain = base64.b64decode(value, validate=True).decode()
    except (ValueError, binascii.Error):
        return None
    mark, reasoning = plain[:48], plain[48:]
    return reasoning if mark == seal(reasoning) else None
