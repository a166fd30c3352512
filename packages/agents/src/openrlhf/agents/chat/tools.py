"""Finds tool calls in what the model wrote, in the formats of common chat templates."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
LISTED = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]

    def wire(self) -> dict[str, Any]:
        """The OpenAI form: arguments are JSON text."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text outside of the calls, and the calls. Text that is no well-formed call stays text."""
    for parse in PARSERS:
        rest, calls = parse(text)
        if calls:
            return rest, calls
    return text, []


def _tagged(text: str) -> tuple[str, list[ToolCall]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""
    calls = [_call(_load(body)) for body in TAGGED.findall(text)]
    if not calls or None in calls:
        return text, []
    return TAGGED.sub("", text).strip(), [c for c in calls if c is not None]


def _listed(text: str) -> tuple[str, list[ToolCall]]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`"""
    before, mark, after = text.partition(LISTED)
    values = _load(after.strip()) if mark else None
    calls = [_call(value) for value in values] if isinstance(values, list) else []
    if not calls or None in calls:
        return text, []
    return before.strip(), [c for c in calls if c is not None]


def _bare(text: str) -> tuple[str, list[ToolCall]]:
    """The whole text is `{"name": ..., "parameters": {...}}`, maybe behind a python tag."""
    call = _call(_load(text.strip().removeprefix(PYTHON_TAG).strip()))
    return ("", [call]) if call is not None else (text, [])


PARSERS: Sequence[Callable[[str], tuple[str, list[ToolCall]]]] = (_tagged, _listed, _bare)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _load(arguments)
    return ToolCall(name=value["name"], arguments=arguments) if isinstance(arguments, dict) else None
