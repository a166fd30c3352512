"""The messages of Anthropic's API: their blocks as messages of a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openrlhf.agents.chat.fields import bad_request, boolean, check_names, shown, text
from openrlhf.agents.chat.messages import Conversation
from openrlhf.agents.chat.render import ChatRenderer
from openrlhf.agents.chat.wires.conversation import ConversationBuilder, seal, text_part

ROLES = ("user", "assistant", "system")
CACHES = frozenset({"type", "cache_control"})
"""What every block may have; the latter is a hint for caches."""
DIRECT = {"type": "direct"}


def read_conversation(system: Any, messages: Any, renderer: ChatRenderer) -> Conversation:
    """`system` and `messages` of a request. Raises a 400 that names the block."""
    builder = ConversationBuilder(renderer)
    if system is not None:
        parts = [_text(block, place) for block, place in _blocks(system, "system")]
        builder.say("system", parts, "system", joint="\n")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a non-empty list of messages", "messages")
    for i, message in enumerate(messages):
        _read_message(message, f"messages[{i}]", builder)
    return builder.finish("messages")


def _read_message(message: Any, where: str, builder: ConversationBuilder) -> None:
    if not isinstance(message, Mapping):
        raise bad_request(f"{where} must be an object with a 'role', got {shown(message)}", where)
    check_names(message, frozenset({"role", "content"}), {}, f"{where}.")
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{where}.role")
    blocks = _blocks(message.get("content"), f"{where}.content")
    if role == "assistant":
        _read_assistant(blocks, where, builder)
    elif role == "system":
        builder.say("system", [_text(block, place) for block, place in blocks], where, joint="\n")
    else:
        _read_user(blocks, where, builder)


def _blocks(content: Any, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """The blocks with their places; a string is one of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of blocks, got {shown(content)}", where)
    places = [(block, f"{where}[{i}]") for i, block in enumerate(content)]
    for block, place in places:
        if not isinstance(block, Mapping):
            raise bad_request(f"{place} must be a block with a 'type', got {shown(block)}", place)
    return places


def _text(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    if block.get("type") != "text":
        raise bad_request(f"{place}: only blocks of text can stand here, got {shown(block)}", place)
    check_names(block, CACHES | {"text"}, {"citations": (([],), "no chat template writes them")}, f"{place}.")
    return text_part(block.get("text"), f"{place}.text")


def _part(block: Mapping[str, Any], place: str, builder: ConversationBuilder) -> dict[str, Any]:
    """A block of text or an image."""
    if block.get("type") != "image":
        return _text(block, place)
    check_names(block, CACHES | {"source"}, {"transformations": ((), "images are read in full")}, f"{place}.")
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind == "base64":
        kind, data = source.get("media_type"), source.get("data")
        url = f"data:{text(kind, f'{place}.source.media_type')};base64,{text(data, f'{place}.source.data')}"
    elif isinstance(source, Mapping) and kind == "url":
        url = text(source.get("url"), f"{place}.source.url")
    else:
        raise bad_request(f"{place}.source must be of type base64 or url, got {shown(source)}", f"{place}.source")
    return builder.image(place, url)


def _read_user(blocks: list[tuple[Mapping[str, Any], str]], where: str, builder: ConversationBuilder) -> None:
    """Results of tools are messages of their own, as templates have them; what stands between them is the user's."""
    parts: list[dict[str, Any]] = []
    for block, place in blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(block, place, builder))
            continue
        if parts:
            builder.say("user", parts, where)
            parts = []
        _read_result(block, place, builder)
    if parts or not blocks:
        builder.say("user", parts, where)


def _read_result(block: Mapping[str, Any], place: str, builder: ConversationBuilder) -> None:
    check_names(block, CACHES | {"tool_use_id", "content", "is_error"}, {"toolset_name": ((), "no toolsets")}, place)
    content = block.get("content")
    inner = [] if content is None else _blocks(content, f"{place}.content")
    parts = [_part(part, spot, builder) for part, spot in inner]
    if boolean(block, "is_error", f"{place}.is_error"):  # templates have no field for it
        parts = [{"type": "text", "text": "Error:"}, *parts]
    builder.result(block.get("tool_use_id"), parts, place, "tool_use_id")


def _read_assistant(blocks: list[tuple[Mapping[str, Any], str]], where: str, builder: ConversationBuilder) -> None:
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, place in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_thinking(block, place))
        elif kind == "tool_use":
            refused = {"toolset_name": ((), "there are no toolsets here"), "caller": ((DIRECT,), "there are no others")}
            check_names(block, CACHES | {"id", "name", "input"}, refused, f"{place}.")
            if not isinstance(block.get("input"), Mapping):
                raise bad_request(f"{place}.input must be an object, got {shown(block.get('input'))}", f"{place}.input")
            calls.append(builder.call(block.get("id"), block.get("name"), block["input"], place))
        elif calls and kind == "text" and block.get("text"):
            raise bad_request(f"{place}: no chat template writes text behind the tool calls of a message", place)
        else:
            parts.append(_text(block, place))
    builder.assistant(parts, "\n".join(thought for thought in thoughts if thought), calls, where)


def _thinking(block: Mapping[str, Any], place: str) -> str:
    check_names(block, CACHES | {"thinking", "signature"}, {}, f"{place}.")
    thinking = text(block.get("thinking"), f"{place}.thinking")
    signature = text(block.get("signature"), f"{place}.signature")
    if thinking and signature != seal(thinking):
        raise bad_request(
            f"{place}.signature does not belong to this thinking: send the block back as it came", f"{place}.signature"
        )
    return thinking
