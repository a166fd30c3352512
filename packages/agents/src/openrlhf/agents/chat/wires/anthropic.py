"""Anthropic's Messages: requests, answers, stream events and the counting of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf.agents.chat.answer import Answer, Choice
from openrlhf.agents.chat.call import AnswerFormat, Call, Display, ToolChoice
from openrlhf.agents.chat.fields import (
    ApiError,
    an_object,
    bad_request,
    boolean,
    check_names,
    integer,
    number,
    shown,
    text,
)
from openrlhf.agents.chat.messages import Conversation
from openrlhf.agents.chat.render import ChatRenderer, Ending
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.chat.wires.anthropic_content import read_conversation
from openrlhf.agents.chat.wires.completions_request import EFFORTS, as_choice, read_model, read_stop
from openrlhf.agents.chat.wires.conversation import seal
from openrlhf.agents.chat.wires.wire import pieces
from openrlhf.agents.json_text import parse_json

HONOURED = frozenset({
    "model", "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature", "top_k", "top_p", "tools",
    "tool_choice", "thinking", "output_config", "session_id",
})  # fmt: skip
LABELS = frozenset({"metadata", "cache_control", "user_profile_id", "workspace_id"})
"""Bookkeeping of the caller and hints for caches."""
DEFAULT_EFFORT = "high"
"""What leaving `output_config.effort` out means, so that it asks for nothing."""
KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""An edit of the history that changes nothing of it."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "there are no containers here"),
    "context_management": (({}, {"edits": []}, {"edits": [KEEP_ALL]}), "the client edits its own history"),
    "diagnostics": ((), "there is no diagnosis of caches here"),
    "inference_geo": ((), "the run's own engines serve this request"),
    "mcp_servers": (([],), "the agent itself calls tools"),
    "service_tier": (("auto", "standard_only"), "the run's own engines serve this request"),
    "speed": (("standard",), "the run's own engines serve this request"),
}
TOOL_FIELDS = frozenset({"name", "description", "input_schema", "type", "strict", "cache_control"})
TOOL_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "allowed_callers": ((["direct"], []), "tools are called by the policy itself"),
    "defer_loading": ((False,), "the policy sees all tools"),
    "eager_input_streaming": ((True, False), "a hint for streams"),
    "input_examples": (([],), "no chat template writes them; put them into the description"),
}
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


def error(refusal: ApiError) -> dict[str, Any]:
    """The error object of the API, whose message names the field."""
    kind = KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": None}


def read_request(body: Any, session: ChatSession) -> Call:
    """Raises ApiError (400) that names the parameter."""
    body = an_object(body)
    check_names(body, HONOURED | LABELS, REFUSED)
    max_tokens = integer(body, "max_tokens", 1, None)
    if max_tokens is None:
        raise bad_request("'max_tokens' is needed", "max_tokens")
    given = {
        "max_tokens": max_tokens,
        "temperature": number(body, "temperature", 0.0, 1.0),
        "top_p": number(body, "top_p", 0.0, 1.0),
        "top_k": integer(body, "top_k", 0, 2**31),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("top_p") == 0.0:
        raise bad_request("'top_p' must be more than 0", "top_p")
    if given.get("top_k") == 0:
        given["top_k"] = -1
    sampling = session.own_sampling(given)
    stops = read_stop(body.get("stop_sequences"), "stop_sequences")
    tools, choice = _read_tools(body)
    conversation, ending = _read_messages(body, session.renderer)
    options, answer_format = _read_output(body, session.renderer)
    return Call(
        model=read_model(body),
        conversation=conversation,
        sampling=sampling.with_(stop=(*sampling.stop, *stops)),
        tools=tools,
        tool_choice=choice,
        answer_format=answer_format,
        options={**options, **_read_thinking(body.get("thinking"), session, sampling.max_tokens or session.max_length)},
        ending=ending,
        separate=True,
        display=Display(stream=boolean(body, "stream")),
        id_prefix="msg_",
        body=body,
    )


async def count_tokens(body: Any, session: ChatSession) -> dict[str, int]:
    """The tokens that a request's prompt has."""
    body = an_object(body)
    check_names(body, (HONOURED | LABELS) - {"max_tokens", "stream", "stop_sequences"}, REFUSED)
    read_model(body)
    tools, _ = _read_tools(body)
    conversation, ending = _read_messages(body, session.renderer)
    options, _ = _read_output(body, session.renderer)
    options = {**options, **_read_thinking(body.get("thinking"), session, None)}
    plan = session.draft(conversation, tools, options, ending)
    await session.images(plan)
    return {"input_tokens": session.prompt_tokens(plan)}


def _read_messages(body: Mapping[str, Any], renderer: ChatRenderer) -> tuple[Conversation, Ending]:
    """The conversation; one that ends with a message of the assistant is to be continued."""
    conversation = read_conversation(body.get("system"), body.get("messages"), renderer)
    last = conversation.messages[-1]
    if last["role"] != "assistant":
        return conversation, Ending.ANSWER
    if last.get("tool_calls"):
        where = conversation.places[-1]
        raise bad_request(f"{where}: the results of its tool calls must come in the next message", where)
    return conversation, Ending.CONTINUED


def _read_tools(body: Mapping[str, Any]) -> tuple[Any, ToolChoice]:
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list):
        raise bad_request(f"'tools' must be a list, got {shown(tools)}", "tools")
    read = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if choice is None:
        return as_choice(read, ToolChoice())
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise bad_request(f"tool_choice.type must be auto, any, tool or none, got {shown(choice)}", "tool_choice.type")
    check_names(choice, frozenset({"type", "name", "disable_parallel_tool_use"}), {}, "tool_choice.")
    if kind == "none":
        return None, ToolChoice()
    parallel = not boolean(choice, "disable_parallel_tool_use", "tool_choice.disable_parallel_tool_use")
    name = text(choice.get("name"), "tool_choice.name") if kind == "tool" else ""
    mode = {"auto": "auto", "any": "required", "tool": "named"}[kind]
    return as_choice(read, ToolChoice(mode=mode, name=name, parallel=parallel))  # type: ignore[arg-type]


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise bad_request(f"{where} must be an object, got {shown(tool)}", where)
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"{where}.type: only tools of the agent's own ('custom') are served here, got "
                          f"{shown(tool['type'])}", f"{where}.type")  # fmt: skip
    check_names(tool, TOOL_FIELDS, TOOL_REFUSED, f"{where}.")
    function: dict[str, Any] = {"name": text(tool.get("name"), f"{where}.name")}
    if not function["name"]:
        raise bad_request(f"{where}.name is empty", f"{where}.name")
    if tool.get("description") is not None:
        function["description"] = text(tool["description"], f"{where}.description")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise bad_request(f"{where}.input_schema must be a JSON schema", f"{where}.input_schema")
    function["parameters"] = tool["input_schema"]
    if boolean(tool, "strict", f"{where}.strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _read_output(body: Mapping[str, Any], renderer: ChatRenderer) -> tuple[dict[str, Any], AnswerFormat | None]:
    """The options of the template and the format that `output_config` asks for."""
    config = {} if body.get("output_config") is None else body["output_config"]
    if not isinstance(config, Mapping):
        raise bad_request(f"'output_config' must be an object, got {shown(config)}", "output_config")
    check_names(config, frozenset({"effort", "format"}), {}, "output_config.")
    options: dict[str, Any] = {}
    effort, form = config.get("effort"), config.get("format")
    if effort is not None:
        where = "output_config.effort"
        if effort not in EFFORTS:
            raise bad_request(f"{where} must be one of {EFFORTS}, got {shown(effort)}", where)
        known = renderer.knows("reasoning_effort")
        if not known and effort != DEFAULT_EFFORT:
            raise bad_request(f"{where}: the policy's chat template knows no reasoning_effort", where)
        if known:
            options["reasoning_effort"] = effort
    if form is None:
        return options, None
    where = "output_config.format"
    if (
        not isinstance(form, Mapping)
        or form.get("type") != "json_schema"
        or not isinstance(form.get("schema"), Mapping)
    ):
        raise bad_request(f"{where} must be {{'type': 'json_schema', 'schema': ...}}, got {shown(form)}", where)
    return options, AnswerFormat(schema=form["schema"], field=where)


def _read_thinking(value: Any, session: ChatSession, limit: int | None) -> dict[str, Any]:
    """The template's switch. limit: tokens of an answer; a budget below it is refused, since nothing would keep it."""
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_request(f"thinking.type must be enabled, adaptive or disabled, got {shown(value)}", "thinking.type")
    check_names(value, frozenset({"type", "budget_tokens", "display"}), {}, "thinking.")
    if value.get("display") not in (None, "summarized", "omitted"):
        raise bad_request("thinking.display must be summarized or omitted", "thinking.display")
    budget = value.get("budget_tokens")
    if kind == "enabled":
        where = "thinking.budget_tokens"
        if type(budget) is not int or budget < 1:
            raise bad_request(f"{where} must be a number of tokens, got {shown(budget)}", where)
        most = min(n for n in (limit, session.engine.settings.max_new_tokens, session.max_length) if n is not None)
        if limit is not None and budget < most - 1:
            raise bad_request(f"{where}: the engine keeps no budget below the {most} tokens of an answer", where)
    if session.renderer.knows("enable_thinking"):
        return {"enable_thinking": kind != "disabled"}
    if kind == "disabled" and "think" in str(session.tokenizer.chat_template):  # type: ignore[attr-defined]
        raise bad_request("thinking.type: the policy's chat template has no switch for reasoning", "thinking.type")
    return {}


def body(answer: Answer) -> dict[str, Any]:
    """A `message`."""
    (choice,) = answer.choices
    reason, stop = _stop(answer, choice)
    message = {**_head(answer), "content": _blocks(answer, choice), "stop_reason": reason, "stop_sequence": stop}
    return {**message, "usage": _usage(answer, answer.completion_tokens), **_malformed(choice)}


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.call.model}


def _malformed(choice: Choice) -> dict[str, Any]:
    return {"malformed_tool_calls": list(choice.malformed)} if choice.malformed else {}


def _blocks(answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        thinking = answer.call.body.get("thinking") or {}
        shown_text = "" if thinking.get("display") == "omitted" else choice.reasoning
        blocks.append({"type": "thinking", "thinking": shown_text, "signature": seal(choice.reasoning)})
    if choice.text or not (choice.calls or blocks):
        blocks.append({"type": "text", "text": choice.text, "citations": None})
    for call in choice.calls:
        function = call["function"]
        arguments = parse_json(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def _stop(answer: Answer, choice: Choice) -> tuple[str, str | None]:
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    if choice.finish_reason == "length":
        return "max_tokens", None
    own = answer.call.body.get("stop_sequences") or ()
    return ("stop_sequence", str(choice.stop_reason)) if choice.stop_reason in own else ("end_turn", None)


def _usage(answer: Answer, completion: int) -> dict[str, int]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answer.prompt_tokens, "output_tokens": completion, **cache}


def chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer up to the end of its last block."""
    (choice,) = answer.choices
    start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
    yield {"type": "message_start", "message": start}
    for i, block in enumerate(_blocks(answer, choice)):
        empty, deltas = _as_deltas(block)
        yield {"type": "content_block_start", "index": i, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": i, "delta": delta}
        yield {"type": "content_block_stop", "index": i}


def _as_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without what comes in its deltas, and those."""
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    written = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(written)]


def last_chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The events that end the message."""
    (choice,) = answer.choices
    reason, stop = _stop(answer, choice)
    delta = {"stop_reason": reason, "stop_sequence": stop, **_malformed(choice)}
    yield {"type": "message_delta", "delta": delta, "usage": _usage(answer, answer.completion_tokens)}
    yield {"type": "message_stop"}
