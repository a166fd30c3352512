"""What a wire format is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat.answer import Answer
from openrlhf.agents.chat.call import Call
from openrlhf.agents.chat.fields import ApiError
from openrlhf.agents.chat.session import ChatSession

CHUNK_CHARACTERS = 64  # of a streamed answer per event; the whole answer is there before the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """read: the body of a request; raises ApiError. body: the JSON of an answer. chunks, last_chunks: the events of a
    streamed one up to, and from, where it is recorded. error: how a refusal is written.

    named: events stand under their `type`. numbered: they carry a sequence number. end: what closes a stream.
    error_event: a refusal in mid-stream, where it is not `error`. keep: what is done once the answer is recorded.
    """

    read: Callable[[Any, ChatSession], Call]
    body: Callable[[Answer], dict[str, Any]]
    chunks: Callable[[Answer], Iterator[dict[str, Any]]]
    last_chunks: Callable[[Answer], Iterator[dict[str, Any]]]
    error: Callable[[ApiError], dict[str, Any]]
    named: bool = False
    numbered: bool = False
    end: str = ""
    error_event: Callable[[ApiError], dict[str, Any]] | None = None
    keep: Callable[[Answer], None] = lambda answer: None

    def event(self, chunk: dict[str, Any], number: int) -> str:
        """A server-sent event, the number-th of its stream."""
        name = f"event: {chunk['type']}\n" if self.named else ""
        chunk = {**chunk, "sequence_number": number} if self.numbered else chunk
        return f"{name}data: {json.dumps(chunk, allow_nan=False)}\n\n"

    def commit(self, answer: Answer) -> bool:
        """Records the answer; False where the session has ended."""
        done = answer.commit()
        if done:
            self.keep(answer)
        return done


def pieces(text: str) -> Iterator[str]:
    """A text as the deltas of a stream."""
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]
