"""Chat messages: from the wire to what templates want, and a key to recognise them when they come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat.errors import bad_request

KEPT = ("role", "name", "tool_call_id", "reasoning_content")
Key = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages as templates take them, their keys, and all images in order."""

    messages: Sequence[dict[str, Any]]
    keys: Sequence[Key]
    images: Sequence[Any]


def read_messages(value: Any) -> Conversation:
    """Checks and converts the `messages` of a request. Raises a 400 that names the message."""
    if not isinstance(value, list) or not value:
        raise bad_request("'messages' must be a non-empty list of messages", "messages")
    images: list[Any] = []
    messages = [_read_message(message, f"messages[{i}]", images) for i, message in enumerate(value)]
    return Conversation(messages=messages, keys=[message_key(m) for m in messages], images=images)


def _read_message(value: Any, where: str, images: list[Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise bad_request(f"{where} must be an object with a 'role', got {value!r}", where)
    message = {key: value[key] for key in KEPT if value.get(key) is not None}
    if message["role"] == "developer":  # the newer name of the same role; templates know the older one
        message["role"] = "system"
    calls = value.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls must be a list", where)
        message["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif value.get("content") is None and message["role"] != "assistant":
        raise bad_request(f"{where} has no 'content'", where)
    message["content"] = _read_content(value.get("content"), where, images)
    return message


def _read_content(content: Any, where: str, images: list[Any]) -> Any:
    """Text, or a list of parts where it holds images."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a string or a list of parts, got {content!r}", where)
    parts: list[dict[str, Any]] = []
    has_image = False
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            images.append(_image_url(part, f"{where}.content[{i}]"))
            parts.append({"type": "image"})
            has_image = True
        else:
            raise bad_request(f"{where}.content[{i}]: only 'text' and 'image_url' parts are supported", where)
    return parts if has_image else "".join(part["text"] for part in parts)


def _image_url(part: Mapping[str, Any], where: str) -> str:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not url:
        raise bad_request(f"{where}: image_url needs a 'url'", where)
    return url


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must have a 'function' with a 'name'", where)
    arguments = read_arguments(function.get("arguments"), where)
    result: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        result["id"] = call["id"]
    return result


def read_arguments(value: Any, where: str) -> dict[str, Any]:
    """Arguments of a tool call as a mapping: templates want one, the wire has JSON text. Empty means none."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise bad_request(f"{where}.function.arguments is no JSON: {error}", where) from error
    if not isinstance(value, dict):
        raise bad_request(f"{where}.function.arguments must be a JSON object, got {value!r}", where)
    return value


def message_key(message: Mapping[str, Any]) -> Key:
    """Equal for messages that say the same. Ids of tool calls and blanks around the text don't count."""
    content = message.get("content") or ""
    text = content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True)
    calls = tuple(
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    return (message["role"], message.get("name"), text, calls)
