"""What a tool returned, in the parts of chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf.agents.json_text import well_formed

if TYPE_CHECKING:
    from mcp_types import CallToolResult

Part = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """parts: `{"type": "text", "text": ...}` and `{"type": "image_url", "image_url": {"url": "data:..."}}`, in order.

    is_error: the model is told what went wrong. structured: the result as JSON where the tool gives one.
    """

    parts: Sequence[Part]
    is_error: bool = False
    structured: Any = None

    @property
    def text(self) -> str:
        return "\n".join(part["text"] for part in self.parts if part["type"] == "text")

    @property
    def images(self) -> list[str]:
        """As `data:` URLs, as `environment_images` and messages take them."""
        return [part["image_url"]["url"] for part in self.parts if part["type"] == "image_url"]

    @property
    def content(self) -> str | list[Part]:
        """Of a message with the role "tool": text, or parts where there are images. An error begins with `Error:`."""
        parts = [{"type": "text", "text": "Error:"}, *self.parts] if self.is_error else list(self.parts)
        if self.images:
            return parts
        return f"Error: {self.text}" if self.is_error else self.text


def refusal(message: str) -> ToolResult:
    """What the model is told of a call that failed."""
    return ToolResult(parts=[_text(message)], is_error=True)


def read_result(result: CallToolResult, max_characters: int) -> ToolResult:
    """The result of a call. Structured content alone is shown as JSON; beside text it is the same once more."""
    structured = well_formed(result.structured_content)
    parts = [_part(block) for block in result.content]
    if not parts and structured is not None:
        parts = [_text(json.dumps(structured, ensure_ascii=False))]
    return ToolResult(parts=_shortened(parts, max_characters), is_error=bool(result.is_error), structured=structured)


def _part(block: Any) -> Part:
    if block.type == "text":
        return _text(block.text)
    if block.type == "image":
        return _image(block.mime_type, block.data)
    if block.type == "resource_link":
        return _text(f"[{block.name}: {block.uri}]")
    if block.type == "resource":
        return _resource(block.resource)
    return _text(f"[{block.type} of the type {block.mime_type}, which is not shown]")


def _resource(resource: Any) -> Part:
    if getattr(resource, "text", None) is not None:
        return _text(resource.text)
    kind = resource.mime_type or ""
    if kind.startswith("image/"):
        return _image(kind, resource.blob)
    return _text(f"[{resource.uri} of the type {kind or 'unknown'}, which is not shown]")


def _text(text: str) -> Part:
    return {"type": "text", "text": well_formed(text)}


def _image(kind: str, data: str) -> Part:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _shortened(parts: Sequence[Part], most: int) -> list[Part]:
    """With at most so many characters of text, in all."""
    kept: list[Part] = []
    left = most
    for part in parts:
        if part["type"] == "text":
            if (cut := len(part["text"]) - left) > 0:
                part = _text(f"{part['text'][:left]} [{cut} more characters]")
            left = max(0, left - len(part["text"]))
        kept.append(part)
    return kept
