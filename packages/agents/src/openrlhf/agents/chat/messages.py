"""Chat messages: from the wire to what templates want, and a key to recognise them when they come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat.fields import bad_request, shown, text
from openrlhf.agents.json_text import parse_json

ROLES = ("system", "user", "assistant", "tool")
RENAMED = {"developer": "system"}  # the newer name of the same role; templates know the older one
SIMILAR = {"human": "user", "model": "assistant", "ai": "assistant", "bot": "assistant", "gpt": "assistant"}
# Fields of a message that would be lost: templates know none of them.
REFUSED = ("function_call", "audio", "refusal")
READ = {"role", "content", "tool_calls", "tool_call_id", "reasoning", *REFUSED}
Key = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages as templates take them, their keys, and all images in order with their places in the request.

    places: what the request calls each message, where that is not `messages[0]` and so on.
    """

    messages: Sequence[dict[str, Any]]
    keys: Sequence[Key]
    images: Sequence[Any]
    image_places: Sequence[str] = ()
    places: Sequence[str] = ()


def read_messages(value: Any) -> Conversation:
    """Checks and converts the `messages` of a request. Raises a 400 that names the message."""
    if not isinstance(value, list) or not value:
        raise bad_request("'messages' must be a non-empty list of messages", "messages")
    images: dict[str, Any] = {}
    messages = [_read_message(message, f"messages[{i}]", images) for i, message in enumerate(value)]
    keys = [message_key(m) for m in messages]
    return Conversation(messages=messages, keys=keys, images=list(images.values()), image_places=list(images))


def _read_message(value: Any, where: str, images: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise bad_request(f"{where} must be an object with a 'role', got {shown(value)}", where)
    for name in REFUSED:
        if value.get(name):
            raise bad_request(f"{where}.{name} is not supported: no chat template writes it", f"{where}.{name}")
    # Whatever else a client adds goes to the template, which is the judge of what it means.
    message = {key: item for key, item in value.items() if key not in READ and item is not None}
    message["role"] = _read_role(value.get("role"), f"{where}.role")
    for name in ("tool_call_id", "name"):
        if value.get(name) is not None:
            message[name] = text(value[name], f"{where}.{name}")
    if value.get("reasoning") is not None:  # the newer name of the same field
        message.setdefault("reasoning_content", text(value["reasoning"], f"{where}.reasoning"))
    calls = value.get("tool_calls")
    if calls:
        message["tool_calls"] = _read_calls(calls, message["role"], where)
    elif value.get("content") is None and message["role"] != "assistant":
        raise bad_request(f"{where} has no 'content'", f"{where}.content")
    message["content"] = _read_content(value.get("content"), f"{where}.content", images)
    return message


def _read_role(role: Any, where: str) -> str:
    role = RENAMED.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        plain = role.strip().lower() if isinstance(role, str) else ""
        meant = SIMILAR.get(plain, plain if plain in ROLES else "")
        hint = f"; did you mean {meant!r}?" if meant else "; results of tools have the role 'tool'"
        known = ", ".join(repr(r) for r in (*ROLES, *RENAMED))
        raise bad_request(f"{where} must be one of {known}, got {shown(role)}{hint if plain else ''}", where)
    return role


def _read_content(content: Any, where: str, images: dict[str, Any]) -> Any:
    """Text, or a list of parts where it holds images."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts, got {shown(content)}", where)
    parts: list[dict[str, Any]] = []
    has_image = False
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            images[f"{where}[{i}]"] = _image_url(part, f"{where}[{i}]")
            parts.append({"type": "image"})
            has_image = True
        else:
            supported = "only parts of type 'text' and 'image_url' are supported"
            raise bad_request(f"{where}[{i}]: {supported}, got {shown(part)}", f"{where}[{i}]")
    return parts if has_image else "".join(part["text"] for part in parts)


def _image_url(part: Mapping[str, Any], where: str) -> str:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise bad_request(f"{where}: image_url needs a 'url', got {shown(value)}", where)
    if isinstance(value, Mapping) and value.get("detail") not in (None, "auto"):
        raise bad_request(f"{where}: image_url.detail is not supported: images are read in full", where)
    return url


def _read_calls(calls: Any, role: str, where: str) -> list[dict[str, Any]]:
    where = f"{where}.tool_calls"
    if role != "assistant":
        raise bad_request(f"{where}: only an assistant makes tool calls, not {role!r}", where)
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list, got {shown(calls)}", where)
    return [_read_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must have a 'function' with a 'name', got {shown(call)}", where)
    arguments = read_arguments(function.get("arguments"), where)
    result: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        result["id"] = text(call["id"], f"{where}.id")
    return result


def read_arguments(value: Any, where: str) -> dict[str, Any]:
    """Arguments of a tool call as a mapping: templates want one, the wire has JSON text. Empty means none."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise bad_request(f"{where}.function.arguments is no JSON: {error}", where) from error
    if not isinstance(value, dict):
        raise bad_request(f"{where}.function.arguments must be a JSON object, got {shown(value)}", where)
    return value


def message_key(message: Mapping[str, Any]) -> Key:
    """Equal for messages that say the same. Names, ids of tool calls and blanks around the text don't count.

    Its last entry is the reasoning, which a client may leave out of what it sends back: see `same_message`.
    """
    content = message.get("content") or ""
    said = content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True)
    reasoning = message.get("reasoning_content") or ""
    calls = tuple(
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    )
    reasoning = reasoning.strip() if isinstance(reasoning, str) else json.dumps(reasoning, sort_keys=True)
    return (message["role"], said, calls, reasoning)


def same_message(recorded: Key, given: Key) -> bool:
    """Whether a message that a client sends is the recorded one, maybe without its reasoning."""
    return recorded == given or (recorded[:-1] == given[:-1] and given[-1] == "")
