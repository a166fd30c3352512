"""Builds the answers of the chat API: completions, stream chunks, log-probs, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.chat.messages import Key, message_key, read_arguments
from openrlhf.agents.chat.request import ChatRequest
from openrlhf.agents.chat.session import ChatSession, Plan
from openrlhf.agents.chat.tools import parse_tool_calls
from openrlhf.agents.engine import Generation

CHUNK_CHARACTERS = 64  # of a streamed answer per event; the whole answer is there before the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One sampled reply. message: as the client gets it. raw: its text without the end token and stop string."""

    generation: Generation
    message: dict[str, Any]
    raw: str
    finish_reason: str
    stop_reason: str | None

    @property
    def key(self) -> Key:
        calls = [
            {"function": {**c["function"], "arguments": read_arguments(c["function"]["arguments"], "reply")}}
            for c in self.message.get("tool_calls") or ()
        ]
        return message_key({**self.message, "tool_calls": calls})


def make_choice(session: ChatSession, plan: Plan, request: ChatRequest, generation: Generation) -> Choice:
    """The message in a generation: without its end token, cut before a stop string, tool calls parsed."""
    ids = list(generation.token_ids)
    if ids and generation.finish_reason == "stop" and _is_special(session, ids[-1]):
        ids = ids[:-1]
    raw = session.decode(plan, ids)
    text, stop_reason = _cut(raw, request.sampling.stop) if generation.finish_reason == "stop" else (raw, None)
    content, calls = parse_tool_calls(text) if request.parse_tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message = {"role": "assistant", "content": content or None, "tool_calls": [call.wire() for call in calls]}
    finish = "tool_calls" if calls else generation.finish_reason
    return Choice(generation=generation, message=message, raw=raw, finish_reason=finish, stop_reason=stop_reason)


def _is_special(session: ChatSession, token_id: int) -> bool:
    if token_id == session.tokenizer.eos_token_id:
        return True
    shown = session.tokenizer.decode([token_id], skip_special_tokens=False)
    return bool(shown) and session.tokenizer.decode([token_id], skip_special_tokens=True) == ""


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and which one it was. The ids keep the stop string."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered request."""

    session: ChatSession
    plan: Plan
    request: ChatRequest
    choices: Sequence[Choice]
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def commit(self) -> None:
        """Records every choice in the session."""
        for choice in self.choices:
            self.session.commit(self.plan, choice.generation, choice.key, choice.raw)

    def body(self) -> dict[str, Any]:
        """The JSON of a non-streamed answer; `token_ids` are what was recorded."""
        choices = [
            {
                "index": i,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "logprobs": self._logprobs(choice),
                "token_ids": list(choice.generation.token_ids),
            }
            for i, choice in enumerate(self.choices)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage(), "token_ids": self._ids()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _ids(self) -> dict[str, list[int]]:
        first = self.choices[0].generation
        return {"prompt_token_ids": list(self.plan.prompt_ids), "completion_token_ids": list(first.token_ids)}

    def usage(self) -> dict[str, int]:
        prompt = len(self.plan.prompt_ids)
        completion = sum(len(choice.generation.token_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        content = []
        for token_id, logprob in zip(choice.generation.token_ids, choice.generation.logprobs, strict=True):
            token = self.session.tokenizer.decode([token_id], skip_special_tokens=False) or f"<id_{token_id}>"
            data = list(token.encode("utf-8", "replace"))
            entry = {"token": token, "bytes": data, "logprob": logprob, "token_id": token_id, "top_logprobs": []}
            content.append(entry)
        return {"content": content, "refusal": None}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer up to, and without, those that end the choices."""
        for i, choice in enumerate(self.choices):
            yield self._chunk(i, {"role": "assistant", "content": ""})
            content = choice.message["content"] or ""
            for start in range(0, len(content), CHUNK_CHARACTERS):
                yield self._chunk(i, {"content": content[start : start + CHUNK_CHARACTERS]})
            for k, call in enumerate(choice.message.get("tool_calls") or ()):
                yield self._chunk(i, {"tool_calls": [{"index": k, **call}]})

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The events that end the choices, then the usage where it was asked for."""
        for i, choice in enumerate(self.choices):
            yield self._chunk(i, {}, choice)
        if self.request.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def _chunk(self, index: int, delta: dict[str, Any], ended: Choice | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        if ended is not None:
            choice["finish_reason"] = ended.finish_reason
            choice["logprobs"] = self._logprobs(ended)
            choice["token_ids"] = list(ended.generation.token_ids)
        return {**self._head("chat.completion.chunk"), "choices": [choice]}
