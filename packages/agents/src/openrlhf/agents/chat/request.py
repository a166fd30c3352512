"""Reads the body of a chat completion request. What would change a sample and is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat.errors import bad_request
from openrlhf.agents.chat.messages import Conversation, read_messages
from openrlhf.agents.engine import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_SEED = 2**63
NUMBERS: Mapping[str, tuple[float, float]] = {  # name: lowest and highest value
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
# Parameters of the API that would change what is sampled and that the engine border does not carry.
REFUSED = ("logit_bias", "functions", "function_call", "prediction", "audio", "modalities", "top_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked request. sampling: the session's template with what the request changes; seed None: the session's."""

    model: str
    conversation: Conversation
    sampling: SamplingParams
    tools: Sequence[Any] | None
    parse_tools: bool
    options: Mapping[str, Any]
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool


def read_chat_request(body: Any, template: SamplingParams) -> ChatRequest:
    """Raises ApiError (400) that names the parameter."""
    if not isinstance(body, Mapping):
        raise bad_request(f"the request must be a JSON object, got {type(body).__name__}")
    for name in REFUSED:
        if body.get(name) not in (None, False, 0, [], {}):
            raise bad_request(f"{name!r} is not supported by this server", name)
    _check_response_format(body.get("response_format"))
    tools = _read_tools(body)
    stream = _boolean(body, "stream")
    return ChatRequest(
        model=_read_model(body),
        conversation=read_messages(body.get("messages")),
        sampling=_read_sampling(body, template),
        tools=tools,
        parse_tools=bool(tools),
        options=_read_options(body),
        n=_integer(body, "n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=stream and bool((body.get("stream_options") or {}).get("include_usage")),
        logprobs=_boolean(body, "logprobs"),
    )


def _read_model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str):
        raise bad_request(f"'model' must be a string, got {model!r}", "model")
    return model


def _read_sampling(body: Mapping[str, Any], template: SamplingParams) -> SamplingParams:
    changes: dict[str, Any] = {name: _number(body, name, *limits) for name, limits in NUMBERS.items()}
    changes["top_k"] = _integer(body, "top_k", -1, MAX_SEED)
    changes["seed"] = _integer(body, "seed", -MAX_SEED, MAX_SEED - 1)
    changes["max_tokens"] = _read_max_tokens(body)
    given = {name: value for name, value in changes.items() if value is not None}
    if given.get("top_p") == 0.0:
        raise bad_request("'top_p' must be more than 0", "top_p")
    if given.get("seed", 0) < 0:  # a signed seed is legal on the wire, the engine takes none
        given["seed"] += MAX_SEED
    stops = _read_stop(body.get("stop"))
    return template.with_(**given, stop=(*template.stop, *stops))


def _read_max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = [_integer(body, name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    return min((limit for limit in limits if limit is not None), default=None)


def _read_stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops) or len(stops) > MAX_STOPS:
        raise bad_request(f"'stop' must be a string or up to {MAX_STOPS} non-empty strings, got {stop!r}", "stop")
    return tuple(stops)


def _read_tools(body: Mapping[str, Any]) -> Sequence[Any] | None:
    choice = body.get("tool_choice", "auto")
    if choice not in (None, "auto", "none"):
        raise bad_request(f"'tool_choice' must be 'auto' or 'none', got {choice!r}", "tool_choice")
    tools = body.get("tools")
    if not tools or choice == "none":
        return None
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) and t.get("type") == "function" for t in tools):
        raise bad_request("'tools' must be a list of {'type': 'function', 'function': {...}}", "tools")
    return tools


def _read_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping) or {"tools", "tokenize", "add_generation_prompt"} & set(options):
        raise bad_request("'chat_template_kwargs' must be an object of template variables", "chat_template_kwargs")
    return dict(options)


def _check_response_format(value: Any) -> None:
    if value is not None and (not isinstance(value, Mapping) or value.get("type") != "text"):
        raise bad_request("'response_format' other than {'type': 'text'} is not supported", "response_format")


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name!r} must be true or false, got {value!r}", name)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_request(f"{name!r} must be a number from {low:g} to {high:g}, got {value!r}", name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # 1e9 in JSON
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise bad_request(f"{name!r} must be an integer {limits}, got {value!r}", name)
    return value
