"""A field of a row as chat messages in one form: role and content, calls as on the wire, whatever the row calls them.

Not here: in which of several forms a chat template takes them (`openrlhf.agents.chat.template`), and what it loses
(`dropped`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.chat.template import PromptError, is_text, text_of

KNOWN_ROLES = ("system", "user", "assistant", "tool")
ROLE_ALIASES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai", "bing", "bard"), "assistant"),
}
"""Roles that data sets write for the usual ones, in lower case."""
CALL_ROLE = "function_call"
"""Role of a message whose content is the JSON text of one call; data of the from/value kind has it."""
_STARTS = ("[{", "[ {", "[\n")


def read_messages(value: Any) -> list[dict[str, Any]]:
    """A field as messages: a list of them (role/content or from/value), its JSON text, or one user's message as text.

    Raises PromptError for anything else, with the number of the message.
    """
    value = parsed(value)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence):
        raise PromptError(f"expected a string or a list of messages, got {type(value).__name__}: {value!r:.80}")
    if not value:
        raise PromptError("expected at least one message, got an empty list")
    return [_message(i, message) for i, message in enumerate(value)]


def parsed(value: Any) -> Any:
    """The value itself, but messages written as text as messages: JSON, or as Python prints a list of them.

    Tables without lists, such as CSV, hold messages so. Any other text is returned as it is.
    """
    if not isinstance(value, str) or not value.lstrip("\ufeff \t\r\n").startswith(_STARTS):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value.strip("\ufeff \t\r\n"))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list) and found and all(isinstance(m, Mapping) and _has_role(m) for m in found):
            return found
    return value


def row_tools(row: Mapping[str, Any]) -> Any:
    """A row's tool descriptions for the chat template: a list, or JSON text of one. Raises PromptError."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise PromptError(f"field 'tools': expected a list or its JSON text ({error})") from error
    return tools or None


def same_messages(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two conversations are the same but for blanks around their texts."""
    return [_stripped(m) for m in left] == [_stripped(m) for m in right]


def joined(before: list[dict[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompt and answer as one conversation. An answer that repeats the prompt's messages is the conversation."""
    return answer if before and same_messages(answer[: len(before)], before) else [*before, *answer]


def _has_role(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("role"), str) or (isinstance(message.get("from"), str) and "value" in message)


def _message(number: int, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not _has_role(given):
        raise PromptError(
            f'message {number}: expected an object with "role" and "content" (or "from" and "value"), got {given!r:.80}'
        )
    message = dict(given)
    if not isinstance(message.get("role"), str):
        message = {"role": message.pop("from"), "content": message.pop("value"), **message}
    message["role"] = _role(message["role"])
    content = message.setdefault("content", None)
    if isinstance(content, list):
        message["content"] = [_part(part) for part in content]
    if message["role"] == CALL_ROLE:
        message |= {"role": "assistant", "content": None, "tool_calls": [_read_call(number, content)]}
    elif isinstance(message.get("function_call"), Mapping):
        message["tool_calls"] = [message.pop("function_call")]
    if message.get("tool_calls") is not None:
        message["tool_calls"] = [_call(number, call) for call in message["tool_calls"]]
    _check_content(number, message)
    return message


def _part(part: Any) -> Any:
    """A part of content, text of every kind as type "text"."""
    plain = isinstance(part, Mapping) and isinstance(part.get("text"), str)
    return {**part, "type": "text"} if plain and part.get("type") in (None, "input_text", "output_text") else part


def _role(role: str) -> str:
    low = role.strip().lower()
    if low in ROLE_ALIASES:
        return ROLE_ALIASES[low]
    return low if low in KNOWN_ROLES or low == CALL_ROLE else role


def _check_content(number: int, message: Mapping[str, Any]) -> None:
    content = message["content"]
    parts_ok = isinstance(content, list) and all(isinstance(p, Mapping) for p in content)
    if not (content is None or isinstance(content, str) or parts_ok):
        raise PromptError(f"message {number}: content must be a string or a list of parts, got {content!r:.80}")
    if content is None and message["role"] in ("system", "user"):
        raise PromptError(
            f"message {number}: the content of role {message['role']!r} is null; write a text, or drop it"
        )


def _read_call(number: int, content: Any) -> Any:
    try:
        call = json.loads(content) if isinstance(content, str) else content
    except json.JSONDecodeError as error:
        raise PromptError(f"message {number}: the call is not JSON: {content!r:.80} ({error})") from None
    return call[0] if isinstance(call, list) and len(call) == 1 else call


def _call(number: int, call: Any) -> dict[str, Any]:
    """A call as on the wire: {"type": "function", "function": {"name", "arguments"}}. Raises PromptError."""
    if isinstance(call, Mapping) and "function" not in call and isinstance(call.get("name"), str):
        rest = {k: v for k, v in call.items() if k not in ("name", "arguments", "parameters")}
        arguments = call.get("arguments", call.get("parameters"))
        call = {"type": "function", **rest, "function": {"name": call["name"], "arguments": arguments}}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(
            f'message {number}: expected a tool call {{"function": {{"name", "arguments"}}}}, got {call!r:.80}'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise PromptError(f"tool call arguments are not JSON: {arguments!r:.80} ({error})") from None
    return {**call, "function": {**function, "arguments": {} if arguments in (None, "") else arguments}}


def _stripped(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    plain = text_of(content) if content is None or isinstance(content, str) or is_text(content) else content
    return {**message, "content": plain.strip() if isinstance(plain, str) else plain}
