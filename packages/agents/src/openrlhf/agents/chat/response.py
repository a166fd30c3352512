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
from openrlhf.agents.chat.tools import parse_tool_calls, read_offered, wire_call
from openrlhf.agents.engine import Generation

CHUNK_CHARACTERS = 64  # of a streamed answer per event; the whole answer is there before the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One sampled reply. message: as the client gets it. raw: its text without the end token."""

    generation: Generation
    message: dict[str, Any]
    raw: str
    finish_reason: str
    stop_reason: str | int | None

    def key(self, plan: Plan) -> Key:
        """Of the message when it comes back, joined to the one that it continues."""
        calls = [
            {"function": {**c["function"], "arguments": read_arguments(c["function"]["arguments"], "reply")}}
            for c in self.message.get("tool_calls") or ()
        ]
        content = (plan.prefill or "") + (self.message["content"] or "")
        return message_key({"role": plan.role, "content": content, "tool_calls": calls})


def make_choice(session: ChatSession, plan: Plan, request: ChatRequest, generation: Generation) -> Choice:
    """The message in a generation: without its end token, cut before a stop string, tool calls parsed."""
    raw = session.decode(plan, _without_end(session, generation))
    text, stop_reason = raw, None
    if generation.finish_reason == "stop":
        text, stop_reason = _stopped(session, plan, request, generation, raw)
    calls = []
    if request.tools:
        text, calls = parse_tool_calls(text, read_offered(request.tools), plan.closing)
    if request.display.skip_special:
        text = _without_special(session, text, generation.token_ids)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        first = session.tool_calls + 1
        session.tool_calls += len(calls)
        wire = [wire_call(call, first + i) for i, call in enumerate(calls)]
        message = {"role": "assistant", "content": text or None, "tool_calls": wire}
    finish = "tool_calls" if calls else generation.finish_reason
    return Choice(generation=generation, message=message, raw=raw, finish_reason=finish, stop_reason=stop_reason)


def _without_end(session: ChatSession, generation: Generation) -> list[int]:
    """The ids without the special token that ended the answer."""
    ids = list(generation.token_ids)
    ended = ids and generation.finish_reason == "stop" and _is_special(session, ids[-1])
    return ids[:-1] if ended else ids


def _is_special(session: ChatSession, token_id: int) -> bool:
    if token_id == session.tokenizer.eos_token_id:
        return True
    shown = session.tokenizer.decode([token_id], skip_special_tokens=False)
    return bool(shown) and session.tokenizer.decode([token_id], skip_special_tokens=True) == ""


def _stopped(
    session: ChatSession, plan: Plan, request: ChatRequest, generation: Generation, raw: str
) -> tuple[str, str | int | None]:
    """The text before the stop token or stop string that ended it, and which one it was. The ids keep both."""
    sampling, ids, kept = request.sampling, generation.token_ids, request.display.stop_string
    if ids and ids[-1] in sampling.stop_token_ids:
        return session.decode(plan, ids if kept else ids[:-1]), ids[-1]
    # A stop string within the first min_tokens tokens stops nothing.
    start = len(session.decode(plan, ids[: sampling.min_tokens])) if sampling.stop and sampling.min_tokens else 0
    found = [(raw.index(stop, start), stop) for stop in sampling.stop if stop in raw[start:]]
    if not found:
        return raw, None
    position, stop = min(found)
    return raw[: position + len(stop) if kept else position], stop


def _without_special(session: ChatSession, text: str, token_ids: Sequence[int]) -> str:
    """The text without special tokens among those that were sampled."""
    for token_id in dict.fromkeys(token_ids):
        if _is_special(session, token_id):
            text = text.replace(session.tokenizer.decode([token_id], skip_special_tokens=False), "")
    return text


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered request."""

    session: ChatSession
    plan: Plan
    request: ChatRequest
    choices: Sequence[Choice]
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", f"chatcmpl-{self.request.display.request_id or uuid.uuid4().hex}")

    def commit(self) -> bool:
        """Records every choice in the session; False where the session has ended."""
        prefill = self.plan.prefill or ""
        done = [self.session.commit(self.plan, c.generation, c.key(self.plan), prefill + c.raw) for c in self.choices]
        return all(done)

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
        body = {**self._head("chat.completion"), "choices": choices, "usage": self.usage(), "token_ids": self._ids()}
        return {**body, **self._prompt()}

    def _prompt(self) -> dict[str, Any]:
        """What the request asked to see of its prompt."""
        display = self.request.display
        return {
            **({"prompt_token_ids": list(self.plan.prompt_ids)} if display.prompt_ids else {}),
            **({"prompt_text": self.plan.text} if display.prompt_text else {}),
        }

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
        if not self.request.display.logprobs:
            return None
        content = []
        for token_id, logprob in zip(choice.generation.token_ids, choice.generation.logprobs, strict=True):
            token = self.session.tokenizer.decode([token_id], skip_special_tokens=False) or f"<id_{token_id}>"
            data = list(token.encode("utf-8", "replace"))
            token = f"token_id:{token_id}" if self.request.display.token_names else token
            entry = {"token": token, "bytes": data, "logprob": logprob, "token_id": token_id, "top_logprobs": []}
            content.append(entry)
        return {"content": content, "refusal": None}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer up to, and without, those that end the choices."""
        for i, choice in enumerate(self.choices):
            first = self._chunk(i, {"role": "assistant", "content": ""})
            yield {**first, **self._prompt()} if i == 0 else first
            content = choice.message["content"] or ""
            for start in range(0, len(content), CHUNK_CHARACTERS):
                yield self._chunk(i, {"content": content[start : start + CHUNK_CHARACTERS]})
            for k, call in enumerate(choice.message.get("tool_calls") or ()):
                yield self._chunk(i, {"tool_calls": [{"index": k, **call}]})

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The events that end the choices, then the usage where it was asked for."""
        for i, choice in enumerate(self.choices):
            yield self._chunk(i, {}, choice)
        if self.request.display.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def _chunk(self, index: int, delta: dict[str, Any], ended: Choice | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
        if ended is not None:
            choice["finish_reason"] = ended.finish_reason
            choice["logprobs"] = self._logprobs(ended)
            choice["token_ids"] = list(ended.generation.token_ids)
        return {**self._head("chat.completion.chunk"), "choices": [choice]}
