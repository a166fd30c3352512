"""What a session remembers of its calls, and how it finds the history that a new call goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.chat.messages import Conversation, Key, same_message
from openrlhf.agents.chat.template import REASONING_KEYS
from openrlhf.agents.recorder import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Where a branch stood after one reply: numbers of its keys, tokens, characters and images.

    key: of its message. raw: its text as sampled, without its end token.
    """

    keys: int
    tokens: int
    text: int
    images: int
    key: Key
    raw: str


@dataclass(slots=True)
class Branch:
    """A linear conversation: its tokens, their text, the keys of its messages (tools first), its images and replies."""

    recorder: Recorder
    text: str = ""
    keys: list[Key] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


Base = tuple[Branch, Reply]


def find_by_text(branches: Sequence[Branch], text: str, images: Sequence[Any]) -> Base | None:
    """The longest recorded history that this text begins with, with the same images."""
    best: Base | None = None
    for branch, reply in _with_images(branches, images):
        longer = best is None or reply.text > best[1].text
        if longer and reply.text <= len(text) and text.startswith(branch.text[: reply.text]):
            best = (branch, reply)
    return best


def find_by_keys(branches: Sequence[Branch], keys: Sequence[Key], images: Sequence[Any]) -> Base | None:
    """The longest recorded history that these messages begin with, whatever the template makes of them."""
    best: Base | None = None
    for branch, reply in _with_images(branches, images):
        longer = (best is None or reply.keys > best[1].keys) and reply.keys < len(keys)
        if not longer or not same_message(reply.key, keys[reply.keys - 1]):
            continue
        if all(map(same_message, branch.keys[: reply.keys], keys)):
            best = (branch, reply)
    return best


def _with_images(branches: Sequence[Branch], images: Sequence[Any]) -> Iterator[Base]:
    """All replies, the last of a branch first, whose images are the first of these."""
    for branch in branches:
        for reply in reversed(branch.replies):
            if branch.images[: reply.images] == list(images[: reply.images]):
                yield branch, reply


def as_sampled(base: Base, keys: Sequence[Key], conversation: Conversation) -> list[dict[str, Any]]:
    """The messages with every recorded reply in the model's own words (tool calls as it spelled them)."""
    branch, last = base
    messages = [dict(message) for message in conversation.messages]
    for reply in branch.replies:
        if reply.keys <= last.keys and same_message(reply.key, keys[reply.keys - 1]):
            message = messages[reply.keys - 2]  # keys also count the tools
            for apart in ("tool_calls", *REASONING_KEYS):
                message.pop(apart, None)
            message["content"] = reply.raw
    return messages


def recorded_keys(branch: Branch, keys: Sequence[Key]) -> list[Key]:
    """The keys of a call that goes on with the branch, with the reasoning that the client has left out."""
    known = [old if same_message(old, new) else new for old, new in zip(branch.keys, keys, strict=False)]
    return [*known, *keys[len(known) :]]
