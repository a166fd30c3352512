"""Tool calls in an answer: found by `tool_formats` where the reasoning is over, given the form of the API here."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from openrlhf.agents.chat.call import ToolChoice
from openrlhf.agents.chat.reasoning import split_reasoning, untagged
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """What an answer says. text: outside of the calls. malformed: what looks like a call and is none, as it was written
    (it stays in the text)."""

    text: str
    calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    malformed: Sequence[str] = ()


class AnswerParser(Protocol):
    """Reads what a model wrote. Nothing that it does reaches the recorded tokens."""

    def read(self, text: str, tools: Sequence[Any], closing: str | None, *, separate: bool) -> Parsed:
        """tools: offered. closing: of the reasoning in which the text begins, see `reasoning.opened`.

        separate: whether the reasoning is taken out of the text.
        """
        ...

    def form(self, tools: Sequence[Any], choice: ToolChoice) -> Mapping[str, Any]:
        """A format of xgrammar's structural tags (a dict with "type") that holds calls of these tools, and nothing
        else."""
        ...


class LightParser:
    """Reasoning in tags, calls in the formats of `tool_formats`; only what stands behind the reasoning is a call. What
    is no well-formed call of an offered tool, or breaks the schema of a strict one, stays text."""

    def read(self, text: str, tools: Sequence[Any], closing: str | None, *, separate: bool) -> Parsed:
        return parse_answer(text, read_offered(tools), closing, separate=separate)

    def form(self, tools: Sequence[Any], choice: ToolChoice) -> Mapping[str, Any]:
        return hermes_form(tools, choice)


def parse_answer(text: str, offered: Offered, closing: str | None = None, *, separate: bool = False) -> Parsed:
    """As `AnswerParser.read`, with our own formats."""
    if not offered and not separate:
        return Parsed(text=text)
    kept: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for is_reasoning, part in split_reasoning(text, closing):
        if is_reasoning:
            (thought if separate else kept).append(untagged(part) if separate else part)
        elif not offered:
            kept.append(part)
        else:
            rest, found = _parse(part, offered)
            malformed += drafts(rest, offered)
            kept.append(rest)
            calls += found
    if not calls and not thought:
        return Parsed(text=text, malformed=malformed)
    reasoning = "\n".join(thought)
    return Parsed(text="".join(kept).strip(), calls=calls, reasoning=reasoning, malformed=malformed)


def hermes_form(tools: Sequence[Any], choice: ToolChoice) -> Mapping[str, Any]:
    """Calls as Hermes and Qwen write them."""
    tags = []
    for tool in tools:
        function = tool["function"]
        if choice.mode != "named" or function["name"] == choice.name:
            name = json.dumps(function["name"], ensure_ascii=False)
            schema = function.get("parameters") or {"type": "object"}
            content = {"type": "json_schema", "json_schema": schema}
            begin = f'<tool_call>\n{{"name": {name}, "arguments": '
            tags.append({"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"})
    several = {"separator": "\n", "at_least_one": True, "stop_after_first": not choice.parallel}
    return {"type": "tags_with_separator", "tags": tags, **several}


def _parse(part: str, offered: Offered) -> Found:
    for recognise in FORMATS.values():
        rest, calls = recognise(part, offered)
        if calls:
            return rest, calls
    return part, []


def drafts(text: str, offered: Offered) -> list[str]:
    """What looks like a call in a text whose calls were taken out. Warns once in a run."""
    draft = DRAFT.search(text)
    if draft is None and _bare_name(text) is None:
        return []
    shown = text[draft.start() if draft else 0 :][:SHOWN]
    warn_once(
        logger,
        "tool call draft",
        "an answer holds what looks like a tool call, but is in none of the known formats (%s) or calls none of the "
        "offered tools (%s); it stays text, as all of its kind will: %r",
        ", ".join(FORMATS),
        ", ".join(offered),
        shown,
    )
    return [shown]


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
