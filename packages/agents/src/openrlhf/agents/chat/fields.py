"""Every field of a chat completion request and what becomes of it: OpenAI's specification and vLLM's additions.

A field is read by `request` (HONOURED), changes nothing of an answer (LABELS), or is refused by name with a reason
(REFUSED) unless it has a neutral value. A field in none of the tables is refused as unknown. `ApiError` is how anything
is refused, in every wire format.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

MAX_SEED = 2**63

HONOURED = frozenset({
    "model", "messages", "session_id", "request_id",
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "n", "stream", "stream_options", "logprobs", "top_logprobs", "response_format",
    "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "documents", "reasoning_effort",
    "add_generation_prompt", "continue_final_message", "skip_special_tokens",
    "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text",
})  # fmt: skip

LABELS = frozenset({  # bookkeeping of the caller and hints for caches: no answer depends on them
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
})  # fmt: skip

_DISTRIBUTION = "it changes the distribution that is sampled from, and the trainer would learn from another one"
_CONSTRAINED = "answers are constrained by 'response_format' and 'tool_choice' only"
_TEXT = "the policy answers with text"
_LOGPROBS = "the engine gives log-probabilities of the answer only ('logprobs' and 'top_logprobs')"
_OLD_TOOLS = "it is the old form of 'tools' and 'tool_choice'"
_TEMPLATE = "the policy's own chat template is used, as it will be after training"
_PROCESSOR = "images are read as they are for training"
_SAMPLING = "every sample is one plain sequence; ask for several with 'n'"
_ENGINE = "the run's own engines serve this request"
_TRUNCATED = "a prompt that is too long is refused, so that the agent knows what the policy saw"

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {  # name: its neutral values besides null, the reason
    "logit_bias": (({},), _DISTRIBUTION),
    "bad_words": (([],), _DISTRIBUTION),
    "allowed_token_ids": ((), _DISTRIBUTION),
    "watermarking": ((False,), _DISTRIBUTION),
    "thinking_token_budget": ((), _DISTRIBUTION),
    "repetition_detection": ((), "answers are not ended early for repeating themselves"),
    "structured_outputs": ((), _CONSTRAINED),
    "guided_json": ((), _CONSTRAINED),
    "guided_regex": ((), _CONSTRAINED),
    "guided_choice": ((), _CONSTRAINED),
    "guided_grammar": ((), _CONSTRAINED),
    "guided_decoding_backend": ((), _CONSTRAINED),
    "guided_whitespace_pattern": ((), _CONSTRAINED),
    "structural_tag": ((), _CONSTRAINED),
    "functions": (([],), _OLD_TOOLS),
    "function_call": (("none",), _OLD_TOOLS),
    "prediction": ((), "there is no speculative decoding from a client's text"),
    "audio": ((), _TEXT),
    "modalities": ((["text"],), _TEXT),
    "web_search_options": ((), "there is no web search here; offer it as a tool"),
    "moderation": ((), "there is no moderation here"),
    "verbosity": (("medium",), "the policy has no such setting; ask for it in the messages"),
    "store": ((False,), "answers are recorded for training only"),
    "service_tier": (("auto", "default"), _ENGINE),
    "prompt_logprobs": ((), _LOGPROBS),
    "logprob_token_ids": (([],), _LOGPROBS),
    "best_of": ((1,), _SAMPLING),
    "use_beam_search": ((False,), _SAMPLING),
    "length_penalty": ((1,), _SAMPLING),
    "early_stopping": ((False,), _SAMPLING),
    "chat_template": ((), _TEMPLATE),
    "add_special_tokens": ((False,), "the chat template writes its own special tokens"),
    "echo": ((False,), "answers hold what was sampled only"),
    "include_reasoning": ((True,), "reasoning is part of the answer's content"),
    "spaces_between_special_tokens": ((True,), "text is shown as the tokenizer decodes it"),
    "truncate_prompt_tokens": ((), _TRUNCATED),
    "truncation_side": ((), _TRUNCATED),
    "media_io_kwargs": (({},), _PROCESSOR),
    "mm_processor_kwargs": (({},), _PROCESSOR),
    "mm_payload": (("tensors",), _PROCESSOR),
    "return_mm_kwargs": ((True,), _PROCESSOR),
    "return_token_offsets": ((False,), "only engines' render endpoints have offsets"),
    "routed_experts_prompt_start": ((0,), _ENGINE),
    "priority": ((0,), _ENGINE),
    "cache_salt": ((), _ENGINE),
    "kv_transfer_params": ((), _ENGINE),
    "ec_transfer_params": ((), _ENGINE),
    "vllm_xargs": (({},), _ENGINE),
    "stream_interval": ((), "a streamed answer is sent when all of it was sampled"),
}

STREAM_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {  # those that are not honoured
    "continuous_usage_stats": ((False,), "usage comes once, at the end"),
    "include_obfuscation": ((False,), "chunks are not padded"),
}
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200
_REPR.maxlevel = 3


class ApiError(Exception):
    """A refusal with an HTTP status; how it is written is the business of the wire format."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """`repr`, shortened: a request may hold megabytes."""
    return _REPR.repr(value)


def check_names(
    value: Mapping[str, Any],
    honoured: frozenset[str],
    refused: Mapping[str, tuple[tuple[Any, ...], str]],
    prefix: str = "",
) -> None:
    """Raises a 400 that names the first field that would be ignored, and why it is refused.

    prefix: of the names in errors, such as "stream_options.".
    """
    for name, given in value.items():
        if name in honoured or (name in refused and _is_neutral(given, refused[name][0])):
            continue
        param = f"{prefix}{name}"
        if name in refused:
            raise bad_request(f"{param!r} is not supported: {refused[name][1]}; got {shown(given)}", param)
        close = difflib.get_close_matches(name[:100], [*honoured, *refused], n=1)
        hint = f"; did you mean {prefix + close[0]!r}?" if close else ""
        raise bad_request(f"unknown field {shown(param)}: it would be ignored{hint}", param, "unknown_field")


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """None, or one of these; 1.0 is 1, but True is not."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


def boolean(body: Mapping[str, Any], name: str, where: str = "") -> bool:
    """The value of a switch; null is off. where: its name in errors."""
    value, where = body.get(name), where or name
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{where!r} must be true or false, got {shown(value)}", where)
    return bool(value)


def number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number within these bounds, None where it is not given."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_request(f"{name!r} must be a number from {low:g} to {high:g}, got {shown(value)}", name)
    return float(value)


def integer(body: Mapping[str, Any], name: str, low: int, high: int | None) -> int | None:
    """An integer within these bounds, None where it is not given."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # 1e9 in JSON
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise bad_request(f"{name!r} must be an integer {limits}, got {shown(value)}", name)
    return value


def text(value: Any, where: str) -> str:
    """The value, which must be a string."""
    if not isinstance(value, str):
        raise bad_request(f"{where} must be a string, got {shown(value)}", where)
    return value


def an_object(body: Any) -> Mapping[str, Any]:
    """The body of a request, which must be a JSON object."""
    if not isinstance(body, Mapping):
        raise bad_request(f"the request must be a JSON object, got {type(body).__name__}")
    return body
