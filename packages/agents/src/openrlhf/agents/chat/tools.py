"""Tool calls in an answer: found by `tool_formats` where the reasoning is over, given the form of the API here."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openrlhf.agents.chat.reasoning import split_reasoning
from openrlhf.agents.chat.tool_formats import FORMATS, Found, Offered, Tool, ToolCall
from openrlhf.agents.failures import warn_once
from openrlhf.agents.graders.patterns import schema_errors

logger = logging.getLogger(__name__)

SHOWN = 200  # characters of a draft in its warning
DRAFT = re.compile(
    r"</?tool_call>|<\|tool_call|<｜tool▁call|\[TOOL_CALLS?\]|\[TOOL_REQUEST\]|<function=|<\|python_tag\|>|</?function_call"
    r"|<tool_use>|<invoke |<｜DSML｜|<start_function_call>|<\|channel\|>commentary to=|<\|tool_sep\|>|<tool_calls>"
)
"""What begins a call in the formats that are known, and in some that are not."""


def read_offered(tools: Sequence[Any] | None) -> Offered:
    """The tools of a checked request by name."""
    return {tool["function"]["name"]: _read_tool(tool["function"]) for tool in tools or ()}


def _read_tool(function: Mapping[str, Any]) -> Tool:
    schema = function.get("parameters") or {}
    properties = schema.get("properties")
    tool = Tool(properties=properties if isinstance(properties, Mapping) else {})
    if not function.get("strict"):
        return tool
    return replace(tool, accepts=functools.partial(_keeps, schema))


def _keeps(schema: Mapping[str, Any], arguments: dict[str, Any]) -> bool:
    """Nothing constrains what the policy writes: a strict tool is called only where the arguments keep its schema."""
    try:
        return not schema_errors(arguments, schema)
    except ValueError as error:
        warn_once(logger, "strict schema", "a tool is strict, but its schema cannot be checked here: %s", error)
        return True


def parse_tool_calls(text: str, offered: Offered, closing: str | None = None) -> tuple[str, list[ToolCall]]:
    """The text outside of the calls, and the calls. Only what stands behind the reasoning is parsed; what is no
    well-formed call of an offered tool, or breaks the schema of a strict one, stays text.

    closing: of the reasoning in which the text begins, see `reasoning.opened`.
    """
    kept: list[str] = []
    calls: list[ToolCall] = []
    for is_reasoning, part in split_reasoning(text, closing):
        rest, found = (part, []) if is_reasoning else _parse(part, offered)
        if not is_reasoning:
            _warn_of_drafts(rest, offered)
        kept.append(rest)
        calls += found
    return ("".join(kept).strip(), calls) if calls else (text, [])


def _parse(part: str, offered: Offered) -> Found:
    for recognise in FORMATS.values():
        rest, calls = recognise(part, offered)
        if calls:
            return rest, calls
    return part, []


def _warn_of_drafts(text: str, offered: Offered) -> None:
    draft = DRAFT.search(text)
    named = _bare_name(text) if draft is None else None
    if draft is None and named is None:
        return
    start = draft.start() if draft else 0
    warn_once(
        logger,
        "tool call draft",
        "an answer holds what looks like a tool call, but is in none of the known formats (%s) or calls none of the "
        "offered tools (%s); it stays text, as all of its kind will: %r",
        ", ".join(FORMATS),
        ", ".join(offered),
        text[start : start + SHOWN],
    )


def _bare_name(text: str) -> str | None:
    """The name in an answer that is nothing but `{"name": ..., "parameters": ...}`."""
    name = re.fullmatch(r'\s*\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:parameters|arguments)".*\}\s*', text, re.DOTALL)
    return name.group(1) if name else None


def wire_call(call: ToolCall, number: int) -> dict[str, Any]:
    """The OpenAI form: arguments are JSON text. number: counts the calls of a session.

    The id is nine letters and digits, which every template takes, and the same in a run that is repeated: some
    templates write it into the prompt.
    """
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or f"call{number:05d}", "type": "function", "function": function}
