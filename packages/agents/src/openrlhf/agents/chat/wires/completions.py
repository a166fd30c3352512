"""OpenAI's Chat Completions: the answers, see `completions_request` for the requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openrlhf.agents.chat.answer import Answer, Choice
from openrlhf.agents.chat.fields import ApiError
from openrlhf.agents.chat.wires.completions_request import read_chat_request
from openrlhf.agents.chat.wires.wire import pieces

__all__ = ["body", "chunks", "error", "last_chunks", "read_chat_request"]


def error(refusal: ApiError) -> dict[str, Any]:
    """The error object of OpenAI's APIs."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def body(answer: Answer) -> dict[str, Any]:
    """A `chat.completion`; its `token_ids` are what was recorded."""
    choices = [
        {
            "index": i,
            "message": message_of(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": _logprobs(answer, choice),
            "token_ids": list(choice.generation.token_ids),
            **_malformed(choice),
        }
        for i, choice in enumerate(answer.choices)
    ]
    head = {**_head(answer, "chat.completion"), "choices": choices, "usage": usage(answer), "token_ids": _ids(answer)}
    return {**head, **_prompt(answer)}


def message_of(choice: Choice) -> dict[str, Any]:
    """The message that the client gets."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning_content"] = message["reasoning"] = choice.reasoning
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": list(choice.calls)}
    return message


def _malformed(choice: Choice) -> dict[str, Any]:
    return {"malformed_tool_calls": list(choice.malformed)} if choice.malformed else {}


def _prompt(answer: Answer) -> dict[str, Any]:
    """What the request asked to see of its prompt."""
    display = answer.call.display
    return {
        **({"prompt_token_ids": list(answer.plan.prompt_ids)} if display.prompt_ids else {}),
        **({"prompt_text": answer.plan.text} if display.prompt_text else {}),
    }


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.call.model}


def _ids(answer: Answer) -> dict[str, list[int]]:
    first = answer.choices[0].generation
    return {"prompt_token_ids": list(answer.plan.prompt_ids), "completion_token_ids": list(first.token_ids)}


def usage(answer: Answer) -> dict[str, int]:
    """How many tokens the call had."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(answer: Answer, choice: Choice) -> dict[str, Any] | None:
    return {"content": answer.logprobs(choice), "refusal": None} if answer.call.display.logprobs else None


def chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer up to, and without, those that end the choices."""
    for i, choice in enumerate(answer.choices):
        first = _chunk(answer, i, {"role": "assistant", "content": ""})
        yield {**first, **_prompt(answer)} if i == 0 else first
        for piece in pieces(choice.reasoning):
            yield _chunk(answer, i, {"reasoning_content": piece, "reasoning": piece})
        for piece in pieces(choice.text):
            yield _chunk(answer, i, {"content": piece})
        for k, call in enumerate(choice.calls):
            yield _chunk(answer, i, {"tool_calls": [{"index": k, **call}]})


def last_chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    """The events that end the choices, then the usage where it was asked for."""
    for i, choice in enumerate(answer.choices):
        yield _chunk(answer, i, {}, choice)
    if answer.call.display.include_usage:
        yield {**_head(answer, "chat.completion.chunk"), "choices": [], "usage": usage(answer)}


def _chunk(answer: Answer, index: int, delta: dict[str, Any], ended: Choice | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
    if ended is not None:
        choice["finish_reason"] = ended.finish_reason
        choice["logprobs"] = _logprobs(answer, ended)
        choice["token_ids"] = list(ended.generation.token_ids)
        choice |= _malformed(ended)
    return {**_head(answer, "chat.completion.chunk"), "choices": [choice]}
