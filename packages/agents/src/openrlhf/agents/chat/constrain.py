"""What an answer is constrained to, as a structural tag: JSON of a schema, calls of tools, maybe behind reasoning.

The tags are those of xgrammar, which vLLM takes as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openrlhf.agents.chat.call import Call
from openrlhf.agents.chat.fields import bad_request
from openrlhf.agents.chat.reasoning import PAIRS
from openrlhf.agents.chat.tools import AnswerParser

FEW = "parallel_tool_calls"
BLANKS = {"type": "regex", "pattern": "[\\n ]{0,4}"}


def structural_tag(call: Call, parser: AnswerParser, closing: str | None, chat_template: str, guided: bool) -> str:
    """The tag of a call in JSON, empty where the answer is free.

    closing: of the reasoning in which the answer begins. chat_template: models that reason by themselves are known by
    its tags. guided: whether the engine can do it. Raises a 400 that names the field where it cannot.
    """
    answer, choice = call.answer_format, call.tool_choice
    tools = call.tools or ()
    if answer is None and (choice.free or not tools):
        return ""
    if not guided:
        name = choice.field if answer is None else answer.field
        raise bad_request(f"{name!r} is not supported: the engine of this run does not constrain answers", name)
    json_text = None if answer is None else {"type": "json_schema", "json_schema": answer.schema}
    if not tools:
        said: Mapping[str, Any] | None = json_text
    else:
        try:
            calls = parser.form(tools, choice)
        except ValueError as error:
            raise bad_request(f"{choice.field!r}: {error}", choice.field) from error
        if choice.mode != "auto":
            said = calls
        elif json_text is not None:
            said = {"type": "or", "elements": [json_text, calls]}
        else:  # one call at most, behind any text
            opening = _begins(calls)
            if not opening:
                raise bad_request("the policy's format of tool calls has no mark: several cannot be kept apart", FEW)
            text = {"type": "any_text", "excludes": [opening]}
            said = {"type": "sequence", "elements": [text, {"type": "optional", "content": calls}]}
    return json.dumps({"type": "structural_tag", "format": _behind_reasoning(said, closing, chat_template)})


def _begins(calls: Mapping[str, Any]) -> str:
    """With what every call begins: up to the first `>` or blank of what its tags share."""
    tags = calls.get("tags") or [{"begin": ""}]
    begin = str(tags[0].get("begin", ""))
    return begin[: begin.find(">") + 1] if ">" in begin else begin.split(maxsplit=1)[0] if begin.strip() else ""


def _behind_reasoning(said: Any, closing: str | None, chat_template: str) -> Mapping[str, Any]:
    """Behind the reasoning that is under way, or behind some or none where the model's template knows its tags."""
    if closing is not None:
        return {"type": "sequence", "elements": [_thought("", closing), BLANKS, said]}
    pairs = [pair for pair in PAIRS.items() if pair[0] in chat_template]
    if not pairs:
        return {"type": "sequence", "elements": [said]}
    first = {"type": "sequence", "elements": [_thought(*pairs[0]), BLANKS]}
    return {"type": "sequence", "elements": [{"type": "optional", "content": first}, said]}


def _thought(begin: str, end: str) -> Mapping[str, Any]:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
