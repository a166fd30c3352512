"""Reads the body of a chat completion request. Every field is honoured or refused by name, see `fields`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from openrlhf.agents.chat.call import AnswerFormat, Call, Display, ToolChoice
from openrlhf.agents.chat.fields import (
    HONOURED,
    LABELS,
    MAX_SEED,
    REFUSED,
    STREAM_OPTIONS,
    an_object,
    bad_request,
    boolean,
    check_names,
    integer,
    number,
    shown,
)
from openrlhf.agents.chat.messages import read_messages
from openrlhf.agents.chat.render import RESERVED, ChatRenderer, Ending
from openrlhf.agents.chat.session import ChatSession
from openrlhf.agents.chat.wires.conversation import with_reasoning
from openrlhf.agents.engine import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
NUMBERS: Mapping[str, tuple[float, float]] = {  # name: lowest and highest value, as the engine takes them
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
TOKENIZE = frozenset({
    "model", "session_id", "prompt", "messages", "tools", "tool_choice", "add_special_tokens", "add_generation_prompt",
    "continue_final_message", "chat_template_kwargs", "documents", "reasoning_effort", "return_token_strs",
})  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def read_chat_request(body: Any, session: ChatSession) -> Call:
    """Raises ApiError (400) that names the parameter."""
    body = an_object(body)
    check_names(body, HONOURED | LABELS, REFUSED)
    tools, choice = read_tools(body)
    conversation = read_messages(body.get("messages"))
    if session.separate:  # what was told apart comes back apart
        messages = [with_reasoning(message, session.renderer) for message in conversation.messages]
        conversation = replace(conversation, messages=messages)
    return Call(
        model=read_model(body),
        conversation=conversation,
        sampling=read_sampling(body, session),
        tools=tools,
        tool_choice=choice,
        answer_format=read_format(body.get("response_format"), "response_format"),
        options=read_options(body),
        n=integer(body, "n", 1, MAX_CHOICES) or 1,
        ending=read_ending(body),
        separate=session.separate,
        display=_read_display(body),
        body=body,
    )


def read_tokenize_request(body: Any, renderer: ChatRenderer) -> tuple[str, bool, bool]:
    """The text of a /tokenize request, whether special tokens are added to it, and whether tokens are shown as text."""
    body = an_object(body)
    check_names(body, TOKENIZE, REFUSED)
    special = boolean(body, "add_special_tokens")  # off: a template writes its own
    strings = boolean(body, "return_token_strs")
    if body.get("messages") is not None:
        messages = read_messages(body["messages"]).messages
        (tools, _), options = read_tools(body), read_options(body)
        renderer.check(messages, tools, options)
        renderer.check_calls(messages)
        return renderer.render(messages, tools, options, read_ending(body)), special, strings
    if not isinstance(body.get("prompt"), str):
        raise bad_request("'prompt' (a string) or 'messages' is needed", "prompt")
    return body["prompt"], special, strings


def read_model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str):
        raise bad_request(f"'model' must be a string, got {shown(model)}", "model")
    return model


def read_sampling(body: Mapping[str, Any], session: ChatSession) -> SamplingParams:
    """What the request changes of the session's template."""
    changes: dict[str, Any] = {name: number(body, name, *limits) for name, limits in NUMBERS.items()}
    changes["top_k"] = integer(body, "top_k", -1, MAX_SEED)
    changes["seed"] = integer(body, "seed", -MAX_SEED, MAX_SEED - 1)
    changes["max_tokens"] = _read_max_tokens(body)
    changes["min_tokens"] = integer(body, "min_tokens", 0, None)
    changes["ignore_eos"] = None if body.get("ignore_eos") is None else boolean(body, "ignore_eos")
    changes["top_logprobs"] = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    given = {name: value for name, value in changes.items() if value is not None}
    if given.get("top_logprobs") and not boolean(body, "logprobs"):
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    if given.get("top_p") == 0.0:
        raise bad_request("'top_p' must be more than 0", "top_p")
    if given.get("top_k") == 0:  # another spelling of "all tokens"
        given["top_k"] = -1
    if given.get("seed", 0) < 0:  # a signed seed is legal on the wire, the engine takes none
        given["seed"] += MAX_SEED
    if given.get("min_tokens", 0) > given.get("max_tokens", math.inf):
        raise bad_request(f"'min_tokens' {given['min_tokens']} is more than max_tokens", "min_tokens")
    stops = read_stop(body.get("stop"), "stop")
    ids = _read_stop_ids(body.get("stop_token_ids"), session.vocabulary)
    sampling = session.own_sampling(given)
    return sampling.with_(stop=(*sampling.stop, *stops), stop_token_ids=(*sampling.stop_token_ids, *ids))


def _read_max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = [integer(body, name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    return min((limit for limit in limits if limit is not None), default=None)


def read_stop(stop: Any, where: str) -> tuple[str, ...]:
    """Stop strings. where: the name of the field in errors."""
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        wanted = f"a non-empty string or up to {MAX_STOPS} of them"
        raise bad_request(f"{where!r} must be {wanted}, got {shown(stop)}", where)
    return tuple(stops)


def _read_stop_ids(value: Any, vocabulary: int | None) -> tuple[int, ...]:
    ids = [] if value is None else value
    limit = MAX_SEED if vocabulary is None else vocabulary
    valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < limit for i in ids) and len(ids) <= MAX_STOPS
    if not valid:
        wanted = f"up to {MAX_STOPS} token ids from 0 to {limit - 1}"
        raise bad_request(f"'stop_token_ids' must be a list of {wanted}, got {shown(value)}", "stop_token_ids")
    return tuple(ids)


def read_tools(body: Mapping[str, Any]) -> tuple[Sequence[Any] | None, ToolChoice]:
    """The offered tools, checked, and which must be called; None where there are none, or none may be called."""
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list):
        raise bad_request("'tools' must be a list of {'type': 'function', 'function': {...}}", "tools")
    for i, tool in enumerate(tools):
        _check_tool(tool, f"tools[{i}]")
    choice = body.get("tool_choice")
    parallel = body.get("parallel_tool_calls") is None or boolean(body, "parallel_tool_calls")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), list):
            raise bad_request("tool_choice.allowed_tools must have 'mode' and 'tools'", "tool_choice.allowed_tools")
        names = [_named(entry) for entry in allowed["tools"]]
        tools, choice = allow_tools(tools, names, "tool_choice.allowed_tools"), allowed.get("mode")
    if choice == "none":
        return None, ToolChoice()
    if choice in (None, "auto", "required"):
        mode = "required" if choice == "required" else "auto"
        return as_choice(tools, ToolChoice(mode=mode, parallel=parallel))
    name = _named(choice)
    if name is None:
        wanted = "'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or allowed_tools"
        raise bad_request(f"'tool_choice' must be {wanted}, got {shown(choice)}", "tool_choice")
    return as_choice(tools, ToolChoice(mode="named", name=name, parallel=False))


def as_choice(tools: Sequence[Any], choice: ToolChoice) -> tuple[Sequence[Any] | None, ToolChoice]:
    """The tools and the choice among them, which must be there."""
    names = [tool["function"]["name"] for tool in tools]
    if choice.mode == "named" and choice.name not in names:
        raise bad_request(f"{choice.field!r} names {shown(choice.name)}, which 'tools' does not have", choice.field)
    if choice.mode == "required" and not tools:
        raise bad_request(f"{choice.field!r} asks for a call, and there are no 'tools'", choice.field)
    return (tools, choice) if tools else (None, ToolChoice())


def allow_tools(tools: Sequence[Any], names: Sequence[str | None], where: str) -> list[Any]:
    """Those of the tools that have these names."""
    known = [tool["function"]["name"] for tool in tools]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise bad_request(f"{where} must name some of the 'tools', got {shown(list(names))}", where)
    return [tool for tool in tools if tool["function"]["name"] in names]


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        wanted = "{'type': 'function', 'function': {'name': ..., ...}}"
        raise bad_request(f"{where} must be {wanted}, got {shown(tool)}", where)
    if not isinstance(function.get("description", ""), str | None):
        raise bad_request(f"{where}.function.description must be a string", f"{where}.function.description")
    if not isinstance(function.get("parameters"), Mapping | None):
        raise bad_request(f"{where}.function.parameters must be a JSON schema", f"{where}.function.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise bad_request(f"{where}.function.strict must be true or false", f"{where}.function.strict")


def read_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables for the chat template, with the fields of the API that are such."""
    options = {} if body.get("chat_template_kwargs") is None else body["chat_template_kwargs"]
    if not isinstance(options, Mapping):
        raise bad_request("'chat_template_kwargs' must be an object of template variables", "chat_template_kwargs")
    reserved = sorted(RESERVED & set(options))
    if reserved:
        raise bad_request(
            f"chat_template_kwargs.{reserved[0]} is no variable of the chat template; if it is a field of the API, "
            "set it beside chat_template_kwargs",
            f"chat_template_kwargs.{reserved[0]}",
        )
    return {**options, **_api_options(body)}


def _api_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    options = {}
    effort, documents = body.get("reasoning_effort"), body.get("documents")
    if effort is not None:
        if effort not in EFFORTS:
            raise bad_request(f"'reasoning_effort' must be one of {EFFORTS}, got {shown(effort)}", "reasoning_effort")
        options["reasoning_effort"] = effort
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(d, Mapping) for d in documents):
            raise bad_request(f"'documents' must be a list of objects, got {shown(documents)}", "documents")
        if documents:
            options["documents"] = documents
    return options


def read_ending(body: Mapping[str, Any]) -> Ending:
    """How the prompt ends: add_generation_prompt (default true) and continue_final_message exclude each other."""
    prompt, continued = body.get("add_generation_prompt"), boolean(body, "continue_final_message")
    if prompt is not None and boolean(body, "add_generation_prompt") and continued:
        raise bad_request(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true", "continue_final_message"
        )
    if continued:
        return Ending.CONTINUED
    return Ending.CLOSED if prompt is False else Ending.ANSWER


def _read_display(body: Mapping[str, Any]) -> Display:
    stream = boolean(body, "stream")
    request_id = "" if body.get("request_id") is None else body["request_id"]
    if not isinstance(request_id, str):
        raise bad_request(f"'request_id' must be a string, got {shown(request_id)}", "request_id")
    return Display(
        stream=stream,
        include_usage=_read_include_usage(body.get("stream_options"), stream),
        logprobs=boolean(body, "logprobs"),
        token_names=boolean(body, "return_tokens_as_token_ids"),
        prompt_ids=boolean(body, "return_token_ids"),
        prompt_text=boolean(body, "return_prompt_text"),
        stop_string=boolean(body, "include_stop_str_in_output"),
        skip_special=boolean(body, "skip_special_tokens"),
        request_id=request_id,
    )


def _read_include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise bad_request(f"'stream_options' must be an object, got {shown(options)}", "stream_options")
    if not stream:
        raise bad_request("'stream_options' needs 'stream': true", "stream_options")
    check_names(options, frozenset({"include_usage"}), STREAM_OPTIONS, "stream_options.")
    return boolean(options, "include_usage")


def read_format(value: Any, where: str) -> AnswerFormat | None:
    """`{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}`."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat(schema={"type": "object"}, field=where)
    outer = value.get("json_schema") if kind == "json_schema" else None
    schema = outer.get("schema") if isinstance(outer, Mapping) else None
    if not isinstance(schema, Mapping):
        wanted = "{'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'schema': ...}}"
        raise bad_request(f"{where!r} must be {wanted}, got {shown(value)}", where)
    return AnswerFormat(schema=schema, field=where)
