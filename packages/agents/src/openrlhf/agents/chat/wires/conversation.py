"""Builds a `Conversation` from the blocks and items of wire formats whose messages are not those of templates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.chat.fields import bad_request, shown, text
from openrlhf.agents.chat.messages import Conversation, Key, message_key
from openrlhf.agents.chat.render import ChatRenderer


class ConversationBuilder:
    """Collects messages in order. Parts of a message are texts, or images by the place where the request has them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._messages: list[dict[str, Any]] = []
        self._keys: list[Key] = []
        self._places: list[str] = []
        self._images: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def image(self, place: str, url: str) -> dict[str, Any]:
        """The part of a message that stands for an image."""
        self._images[place] = url
        return {"type": "image"}

    def say(self, role: str, parts: Sequence[Mapping[str, Any]], place: str, joint: str = "") -> None:
        """A message of the system, the user or, without calls and reasoning, the assistant. joint: between texts."""
        self._add({"role": role, "content": _content(parts, joint)}, place)

    def assistant(self, parts: Sequence[Mapping[str, Any]], reasoning: str, calls: Sequence[Any], place: str) -> None:
        """A message of the policy. calls: as `call` makes them."""
        message: dict[str, Any] = {"role": "assistant", "content": _content(parts, "")}
        if calls:
            message["tool_calls"] = list(calls)
        if reasoning:
            message["reasoning_content"] = reasoning
        self._add(message, place)

    def call(self, call_id: Any, name: Any, arguments: Mapping[str, Any], place: str) -> dict[str, Any]:
        """A tool call of the message that `assistant` will add."""
        call_id, name = text(call_id, f"{place}.id"), text(name, f"{place}.name")
        self._names[call_id] = name
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}

    def result(self, call_id: Any, parts: Sequence[Mapping[str, Any]], place: str, field: str) -> None:
        """The answer of a tool. Raises a 400 where no message before has such a call."""
        if not isinstance(call_id, str) or call_id not in self._names:
            raise bad_request(f"{place}.{field} {shown(call_id)}: no call before has this id", f"{place}.{field}")
        message = {"role": "tool", "tool_call_id": call_id, "name": self._names[call_id]}
        self._add({**message, "content": _content(parts, "\n")}, place)

    def _add(self, message: dict[str, Any], place: str) -> None:
        self._keys.append(message_key(message))
        self._messages.append(with_reasoning(message, self._renderer))
        self._places.append(place)

    @property
    def roles(self) -> list[str]:
        """Of the messages so far."""
        return [message["role"] for message in self._messages]

    def finish(self, field: str) -> Conversation:
        """The conversation, which must have messages. field: what the request calls them."""
        if not self._messages:
            raise bad_request(f"{field!r} must hold at least one message", field)
        return Conversation(
            messages=self._messages,
            keys=self._keys,
            images=list(self._images.values()),
            image_places=list(self._images),
            places=self._places,
        )


def with_reasoning(message: dict[str, Any], renderer: ChatRenderer) -> dict[str, Any]:
    """The message with its reasoning where the template has it: behind a key of its own, or in tags in the content."""
    if not message.get("reasoning_content") or renderer.knows_reasoning:
        return message
    message = dict(message)
    thought = f"<think>\n{message.pop('reasoning_content')}\n</think>\n\n"
    content = message["content"]
    said = thought + content if isinstance(content, str) else [{"type": "text", "text": thought}, *content]
    return {**message, "content": said}


def text_part(value: Any, place: str) -> dict[str, Any]:
    """A text as a part of a message."""
    return {"type": "text", "text": text(value, place)}


def _content(parts: Sequence[Mapping[str, Any]], joint: str) -> Any:
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return joint.join(part["text"] for part in parts)


def seal(reasoning: str) -> str:
    """What goes with reasoning to the client and comes back with it: a part that was changed is known by it."""
    return hashlib.blake2b(reasoning.encode(), digest_size=24).hexdigest()
