"""Reads the body of a chat completion request. Every field is honoured or refused by name, see `fields`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.chat.fields import REFUSED, STREAM_OPTIONS, bad_request, check_fields, check_names, shown
from openrlhf.agents.chat.messages import Conversation, read_messages
from openrlhf.agents.chat.render import RESERVED, ChatRenderer, Ending
from openrlhf.agents.engine import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_SEED = 2**63
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Display:
    """How the answer is shown; nothing here changes what is sampled."""

    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_names: bool = False  # tokens of the log-probs as "token_id:N"
    prompt_ids: bool = False
    prompt_text: bool = False
    stop_string: bool = False  # the stop string stays in the text
    skip_special: bool = False
    request_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked request. sampling: the session's template with what the request changes; seed None: the session's."""

    model: str
    conversation: Conversation
    sampling: SamplingParams
    tools: Sequence[Any] | None
    options: Mapping[str, Any]
    n: int
    ending: Ending = Ending.ANSWER
    display: Display = field(default_factory=Display)


def read_chat_request(body: Any, template: SamplingParams, vocabulary: int | None = None) -> ChatRequest:
    """vocabulary: the number of token ids. Raises ApiError (400) that names the parameter."""
    if not isinstance(body, Mapping):
        raise bad_request(f"the request must be a JSON object, got {type(body).__name__}")
    check_fields(body)
    _check_response_format(body.get("response_format"))
    return ChatRequest(
        model=_read_model(body),
        conversation=read_messages(body.get("messages")),
        sampling=_read_sampling(body, template, vocabulary),
        tools=read_tools(body),
        options=read_options(body),
        n=_integer(body, "n", 1, MAX_CHOICES) or 1,
        ending=read_ending(body),
        display=_read_display(body),
    )


def read_tokenize_request(body: Any, renderer: ChatRenderer) -> tuple[str, bool, bool]:
    """The text of a /tokenize request, whether special tokens are added to it, and whether tokens are shown as text."""
    if not isinstance(body, Mapping):
        raise bad_request(f"the request must be a JSON object, got {type(body).__name__}")
    check_names(body, TOKENIZE, REFUSED)
    special = boolean(body, "add_special_tokens")  # off: a template writes its own
    strings = boolean(body, "return_token_strs")
    if body.get("messages") is not None:
        messages = read_messages(body["messages"]).messages
        tools, options = read_tools(body), read_options(body)
        renderer.check(messages, tools, options)
        renderer.check_calls(messages)
        return renderer.render(messages, tools, options, read_ending(body)), special, strings
    if not isinstance(body.get("prompt"), str):
        raise bad_request("'prompt' (a string) or 'messages' is needed", "prompt")
    return body["prompt"], special, strings


def _read_model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str):
        raise bad_request(f"'model' must be a string, got {shown(model)}", "model")
    return model


def _read_sampling(body: Mapping[str, Any], template: SamplingParams, vocabulary: int | None) -> SamplingParams:
    changes: dict[str, Any] = {name: _number(body, name, *limits) for name, limits in NUMBERS.items()}
    changes["top_k"] = _integer(body, "top_k", -1, MAX_SEED)
    changes["seed"] = _integer(body, "seed", -MAX_SEED, MAX_SEED - 1)
    changes["max_tokens"] = _read_max_tokens(body)
    changes["min_tokens"] = _integer(body, "min_tokens", 0, None)
    changes["ignore_eos"] = None if body.get("ignore_eos") is None else boolean(body, "ignore_eos")
    given = {name: value for name, value in changes.items() if value is not None}
    if given.get("top_p") == 0.0:
        raise bad_request("'top_p' must be more than 0", "top_p")
    if given.get("top_k") == 0:  # another spelling of "all tokens"
        given["top_k"] = -1
    if given.get("seed", 0) < 0:  # a signed seed is legal on the wire, the engine takes none
        given["seed"] += MAX_SEED
    if given.get("min_tokens", 0) > given.get("max_tokens", math.inf):
        raise bad_request(f"'min_tokens' {given['min_tokens']} is more than max_tokens", "min_tokens")
    stops = _read_stop(body.get("stop"))
    ids = _read_stop_ids(body.get("stop_token_ids"), vocabulary)
    return template.with_(**given, stop=(*template.stop, *stops), stop_token_ids=(*template.stop_token_ids, *ids))


def _read_max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = [_integer(body, name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    return min((limit for limit in limits if limit is not None), default=None)


def _read_stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        wanted = f"a non-empty string or up to {MAX_STOPS} of them"
        raise bad_request(f"'stop' must be {wanted}, got {shown(stop)}", "stop")
    return tuple(stops)


def _read_stop_ids(value: Any, vocabulary: int | None) -> tuple[int, ...]:
    ids = [] if value is None else value
    limit = MAX_SEED if vocabulary is None else vocabulary
    valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < limit for i in ids) and len(ids) <= MAX_STOPS
    if not valid:
        wanted = f"up to {MAX_STOPS} token ids from 0 to {limit - 1}"
        raise bad_request(f"'stop_token_ids' must be a list of {wanted}, got {shown(value)}", "stop_token_ids")
    return tuple(ids)


def read_tools(body: Mapping[str, Any]) -> Sequence[Any] | None:
    """The offered tools, checked; None where there are none, or none may be called."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        reason = "answers are not constrained to a call"
        raise bad_request(f"'tool_choice' must be 'auto' or 'none' ({reason}), got {shown(choice)}", "tool_choice")
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list):
        raise bad_request("'tools' must be a list of {'type': 'function', 'function': {...}}", "tools")
    for i, tool in enumerate(tools):
        _check_tool(tool, f"tools[{i}]")
    return tools if tools and choice != "none" else None


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


def _check_response_format(value: Any) -> None:
    if value is not None and (not isinstance(value, Mapping) or value.get("type") != "text"):
        reason = "answers are not constrained; describe the format in the messages and check it in the reward"
        raise bad_request(
            f"'response_format' other than {{'type': 'text'}} is not supported: {reason}", "response_format"
        )


def boolean(body: Mapping[str, Any], name: str) -> bool:
    """The value of a switch; null is off."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name!r} must be true or false, got {shown(value)}", name)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_request(f"{name!r} must be a number from {low:g} to {high:g}, got {shown(value)}", name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # 1e9 in JSON
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise bad_request(f"{name!r} must be an integer {limits}, got {shown(value)}", name)
    return value
