"""OpenAI's Responses: requests with and without state, answers and stream events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf.agents.chat.answer import Answer
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
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.chat.wires.completions_request import (
    EFFORTS,
    MAX_TOP_LOGPROBS,
    allow_tools,
    as_choice,
    read_format,
    read_model,
)
from openrlhf.agents.chat.wires.responses_items import items_of, read_items, sealed
from openrlhf.agents.chat.wires.wire import pieces

HONOURED = frozenset({
    "model", "input", "instructions", "max_output_tokens", "previous_response_id", "reasoning", "store", "stream",
    "stream_options", "temperature", "top_p", "top_logprobs", "text", "tool_choice", "tools", "include",
    "parallel_tool_calls", "session_id",
})  # fmt: skip
LABELS = frozenset({
    "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "client_metadata",
    "max_tool_calls",  # of built-in tools, of which there are none
})  # fmt: skip
_ENGINE = "the run's own engines serve this request"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((), _ENGINE),
    "background": ((False,), "an answer comes with its request"),
    "background_options": ((), "an answer comes with its request"),
    "context_management": (([],), "the client edits its own history"),
    "conversation": ((), "use previous_response_id"),
    "image": ((), "the policy answers with text"),
    "moderation": ((), "there is no moderation here"),
    "prompt": ((), "there are no stored prompts here"),
    "service_tier": (("auto", "default"), _ENGINE),
    "truncation": (("disabled",), "a prompt that is too long is refused, so that the agent knows what the policy saw"),
}
TOOL_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "allowed_callers": ((["direct"],), "the policy calls functions itself"),
    "defer_loading": ((False,), "the policy sees all tools"),
    "output_schema": ((), "no chat template writes it"),
}
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


def read_request(body: Any, session: ChatSession) -> Call:
    """Raises ApiError (400) that names the parameter."""
    body = an_object(body)
    check_names(body, HONOURED | LABELS, REFUSED)
    stream = boolean(body, "stream")
    _check_rest(body, stream)
    tools, choice = _read_tools(body)
    given = {
        "max_tokens": integer(body, "max_output_tokens", 1, None),
        "temperature": number(body, "temperature", 0.0, 2.0),
        "top_p": number(body, "top_p", 0.0, 1.0),
        "top_logprobs": integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS),
    }
    if given["top_p"] == 0.0:
        raise bad_request("'top_p' must be more than 0", "top_p")
    instructions = None if body.get("instructions") is None else text(body["instructions"], "instructions")
    before = _previous(body, session)
    items = items_of(body.get("input"))
    conversation = read_items(instructions, before, items, session.stored, session.renderer)
    include = body.get("include") or []
    return Call(
        model=read_model(body),
        conversation=conversation,
        sampling=session.own_sampling({name: value for name, value in given.items() if value is not None}),
        tools=tools,
        tool_choice=choice,
        answer_format=_read_format(body),
        options=_read_reasoning(body, session),
        separate=True,
        display=Display(stream=stream, logprobs=LOGPROBS in include or bool(given["top_logprobs"])),
        id_prefix="resp_",
        body={**body, "items": [*before, *items]},
    )


def _check_rest(body: Mapping[str, Any], stream: bool) -> None:
    options, include = body.get("stream_options"), body.get("include")
    if options is not None:
        if not isinstance(options, Mapping) or not stream:
            raise bad_request("'stream_options' must be an object, beside 'stream': true", "stream_options")
        refused = {"include_obfuscation": ((False,), "events are not padded")}
        check_names(options, frozenset(), refused, "stream_options.")
    if include is not None:
        if not isinstance(include, list):
            raise bad_request(f"'include' must be a list, got {shown(include)}", "include")
        unknown = [name for name in include if name not in (ENCRYPTED, LOGPROBS)]
        if unknown:
            raise bad_request(f"'include' can hold {ENCRYPTED} and {LOGPROBS}, got {shown(unknown[0])}", "include")
    boolean(body, "store")


def _previous(body: Mapping[str, Any], session: ChatSession) -> list[Mapping[str, Any]]:
    """The items of the answer that the request goes on from, and of all before it."""
    name = body.get("previous_response_id")
    if name is None:
        return []
    if not isinstance(name, str) or name not in session.stored:
        message = f"previous response {shown(name)} not found: it was not stored in this session"
        raise bad_request(message, "previous_response_id", "previous_response_not_found")
    return session.stored[name]["items"]


def _read_format(body: Mapping[str, Any]) -> AnswerFormat | None:
    config = {} if body.get("text") is None else body["text"]
    if not isinstance(config, Mapping):
        raise bad_request(f"'text' must be an object, got {shown(config)}", "text")
    refused = {"verbosity": (("medium",), "the policy has no such setting; ask for it in the messages")}
    check_names(config, frozenset({"format"}), refused, "text.")
    form = config.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return read_format(form, "text.format")


def _read_reasoning(body: Mapping[str, Any], session: ChatSession) -> dict[str, Any]:
    config = {} if body.get("reasoning") is None else body["reasoning"]
    if not isinstance(config, Mapping):
        raise bad_request(f"'reasoning' must be an object, got {shown(config)}", "reasoning")
    refused = {
        "summary": (("auto",), "reasoning comes as it is"),
        "generate_summary": (("auto",), "reasoning comes as it is"),
        "context": (("auto",), "the chat template decides which reasoning it keeps"),
        "mode": (("standard",), "there is one model"),
    }
    check_names(config, frozenset({"effort"}), refused, "reasoning.")
    effort, where = config.get("effort"), "reasoning.effort"
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise bad_request(f"{where} must be one of {EFFORTS}, got {shown(effort)}", where)
    if not session.renderer.knows("reasoning_effort"):
        raise bad_request(f"{where}: the policy's chat template knows no reasoning_effort", where)
    return {"reasoning_effort": effort}


def _read_tools(body: Mapping[str, Any]) -> tuple[Any, ToolChoice]:
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list):
        raise bad_request(f"'tools' must be a list, got {shown(tools)}", "tools")
    read = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    parallel = body.get("parallel_tool_calls") is None or boolean(body, "parallel_tool_calls")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in choice["tools"]]
        read, choice = allow_tools(read, names, "tool_choice.tools"), choice.get("mode")
    if choice == "none":
        return None, ToolChoice()
    if choice in (None, "auto", "required"):
        return as_choice(read, ToolChoice(mode="required" if choice == "required" else "auto", parallel=parallel))
    named = isinstance(choice, Mapping) and choice.get("type") == "function" and choice.get("name")
    if not isinstance(named, str):
        wanted = "none, auto, required, {'type': 'function', 'name': ...} or allowed_tools"
        raise bad_request(f"'tool_choice' must be {wanted}, got {shown(choice)}", "tool_choice")
    return as_choice(read, ToolChoice(mode="named", name=named, parallel=False))


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise bad_request(f"{where}: only tools of type function are served here, got {shown(tool)}", f"{where}.type")
    fields = frozenset({"type", "name", "description", "parameters", "strict"})
    check_names(tool, fields, TOOL_REFUSED, f"{where}.")
    function: dict[str, Any] = {"name": text(tool.get("name"), f"{where}.name")}
    if not function["name"]:
        raise bad_request(f"{where}.name is empty", f"{where}.name")
    if tool.get("description") is not None:
        function["description"] = text(tool["description"], f"{where}.description")
    if tool.get("parameters") is not None:
        if not isinstance(tool["parameters"], Mapping):
            raise bad_request(f"{where}.parameters must be a JSON schema", f"{where}.parameters")
        function["parameters"] = tool["parameters"]
    if boolean(tool, "strict", f"{where}.strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def output(answer: Answer) -> list[dict[str, Any]]:
    """The items of an answer."""
    (choice,) = answer.choices
    include = answer.call.body.get("include") or []
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        content = [{"type": "reasoning_text", "text": choice.reasoning}]
        item = {"id": f"rs_{answer.name}", "type": "reasoning", "summary": [], "content": content, "status": status}
        items.append(item | ({"encrypted_content": sealed(choice.reasoning)} if ENCRYPTED in include else {}))
    if choice.text or not (choice.calls or items):
        part: dict[str, Any] = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        if answer.call.display.logprobs:
            part["logprobs"] = answer.logprobs(choice)
        message = {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "status": status}
        items.append({**message, "content": [part]})
    for i, call in enumerate(choice.calls):
        ids = {"id": f"fc_{answer.name}_{i}", "call_id": call["id"]}
        items.append({**ids, "type": "function_call", **call["function"], "status": "completed"})
    return items


def body(answer: Answer) -> dict[str, Any]:
    """A finished `response`. It is kept in the session, where the request says nothing else."""
    (choice,) = answer.choices
    cut = choice.finish_reason == "length"
    items = output(answer)
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": _reasoning_tokens(answer)},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    response = {
        **_head(answer, "incomplete" if cut else "completed"),
        "completed_at": int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": usage,
    }
    if choice.malformed:
        response["malformed_tool_calls"] = list(choice.malformed)
    return response


def keep(answer: Answer) -> None:
    """Lets later requests go on from this answer by its id."""
    request = answer.call.body
    if request.get("store") is not False:
        response = body(answer)
        items = [*request["items"], *response["output"]]
        answer.session.stored[answer.id] = {"items": items, "response": response}


def _reasoning_tokens(answer: Answer) -> int:
    (choice,) = answer.choices
    return len(answer.session.tokenizer.encode(choice.reasoning, add_special_tokens=False)) if choice.reasoning else 0


def _head(answer: Answer, status: str) -> dict[str, Any]:
    request, sampling = answer.call.body, answer.call.sampling
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata") or {},
        "model": answer.call.model,
        "output": [],
        "parallel_tool_calls": answer.call.tool_choice.parallel,
        "previous_response_id": request.get("previous_response_id"),
        "reasoning": request.get("reasoning") or {"effort": None, "summary": None},
        "store": request.get("store") is not False,
        "temperature": sampling.temperature,
        "text": request.get("text") or {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_logprobs": sampling.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.get("user"),
    }


def error_event(refusal: ApiError) -> dict[str, Any]:
    """A refusal in mid-stream."""
    return {"type": "error", "code": refusal.code, "message": refusal.message, "param": refusal.param}


def chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer up to the end of its last item."""
    running = _head(answer, "in_progress")
    yield {"type": "response.created", "response": running}
    yield {"type": "response.in_progress", "response": running}
    for i, item in enumerate(output(answer)):
        begun = {**item, "status": "in_progress", **({"content": []} if "content" in item else {"arguments": ""})}
        yield {"type": "response.output_item.added", "output_index": i, "item": begun}
        place = {"item_id": item["id"], "output_index": i}
        if item["type"] == "function_call":
            yield from _texts("function_call_arguments", place, "arguments", item["arguments"])
        else:
            yield from _part(item["content"][0], {**place, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": i, "item": item}


def _part(part: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    if part["type"] == "output_text":
        for event in _texts("output_text", place, "text", part["text"]):
            yield {**event, "logprobs": part["logprobs"] if event["type"].endswith(".done") else []}
    else:
        yield from _texts("reasoning_text", place, "text", part["text"])
    yield {"type": "response.content_part.done", **place, "part": part}


def _texts(kind: str, place: dict[str, Any], name: str, whole: str) -> Iterator[dict[str, Any]]:
    for piece in pieces(whole):
        yield {"type": f"response.{kind}.delta", **place, "delta": piece}
    yield {"type": f"response.{kind}.done", **place, name: whole}


def last_chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The event that ends the response."""
    response = body(answer)
    yield {"type": f"response.{response['status']}", "response": response}
