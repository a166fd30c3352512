"""What a generation says, and the answered request: the same for all wire formats, which `wires` writes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.chat.call import Call
from openrlhf.agents.chat.fields import bad_request
from openrlhf.agents.chat.messages import Key, message_key, read_arguments
from openrlhf.agents.chat.session import ChatSession, Plan
from openrlhf.agents.chat.tools import wire_call
from openrlhf.agents.engine import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One sampled reply. calls: in the form of Chat Completions. raw: its text without the end token.

    finish_reason: "stop", "length" or "tool_calls". stop_reason: the stop string or token id that ended it. malformed:
    what looks like a call and is none.
    """

    generation: Generation
    text: str
    reasoning: str
    calls: Sequence[dict[str, Any]]
    raw: str
    finish_reason: str
    stop_reason: str | int | None
    malformed: Sequence[str] = ()

    def key(self, plan: Plan) -> Key:
        """Of the message when it comes back, joined to the one that it continues."""
        calls = [
            {"function": {**c["function"], "arguments": read_arguments(c["function"]["arguments"], "reply")}}
            for c in self.calls
        ]
        content = (plan.prefill or "") + self.text
        message = {"role": plan.role, "content": content, "tool_calls": calls, "reasoning_content": self.reasoning}
        return message_key(message)


def make_choice(session: ChatSession, plan: Plan, call: Call, generation: Generation) -> Choice:
    """The message in a generation: without its end token, cut before a stop string, tool calls parsed."""
    if call.sampling.top_logprobs and len(generation.top_logprobs) != len(generation.token_ids):
        raise bad_request("the engine of this run gives log-probs of sampled tokens only", "top_logprobs")
    raw = session.decode(plan, _without_end(session, generation))
    text, stop_reason = raw, None
    if generation.finish_reason == "stop":
        text, stop_reason = _stopped(session, plan, call, generation, raw)
    said = session.parser.read(text, call.tools or (), plan.closing, separate=call.separate)
    text = said.text
    if call.display.skip_special:
        text = _without_special(session, text, generation.token_ids)
    first = session.tool_calls + 1
    session.tool_calls += len(said.calls)
    return Choice(
        generation=generation,
        text=text,
        reasoning=said.reasoning,
        calls=[wire_call(one, first + i) for i, one in enumerate(said.calls)],
        raw=raw,
        finish_reason="tool_calls" if said.calls else generation.finish_reason,
        stop_reason=stop_reason,
        malformed=said.malformed,
    )


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
    session: ChatSession, plan: Plan, call: Call, generation: Generation, raw: str
) -> tuple[str, str | int | None]:
    """The text before the stop token or stop string that ended it, and which one it was. The ids keep both."""
    sampling, ids, kept = call.sampling, generation.token_ids, call.display.stop_string
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
    call: Call
    choices: Sequence[Choice]
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def id(self) -> str:
        """The id that the client gets, and may name rewards of single replies by."""
        return f"{self.call.id_prefix}{self.call.display.request_id or self.name}"

    def commit(self) -> bool:
        """Records every choice in the session; False where the session has ended."""
        prefill, plan, session = self.plan.prefill or "", self.plan, self.session
        done = [session.commit(plan, c.generation, c.key(plan), prefill + c.raw, self.id) for c in self.choices]
        if all(done):
            session.malformed += sum(bool(choice.malformed) for choice in self.choices)
        return all(done)

    @property
    def prompt_tokens(self) -> int:
        return self.session.prompt_tokens(self.plan)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.generation.token_ids) for choice in self.choices)

    def logprobs(self, choice: Choice) -> list[dict[str, Any]]:
        """Per sampled token its log-prob, and the likeliest ones that were asked for."""
        entries = []
        generation = choice.generation
        tops = generation.top_logprobs or [()] * len(generation.token_ids)
        for token_id, logprob, top in zip(generation.token_ids, generation.logprobs, tops, strict=True):
            likeliest = [self._token(i, p) for i, p in top[: self.call.sampling.top_logprobs]]
            entries.append({**self._token(token_id, logprob), "token_id": token_id, "top_logprobs": likeliest})
        return entries

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.session.tokenizer.decode([token_id], skip_special_tokens=False) or f"<id_{token_id}>"
        data = list(token.encode("utf-8", "replace"))
        return {
            "token": f"token_id:{token_id}" if self.call.display.token_names else token,
            "bytes": data,
            "logprob": logprob,
        }
