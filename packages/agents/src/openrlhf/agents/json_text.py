"""JSON that models and clients write: every failure is a ValueError, however deep the text nests."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 128
"""Deeper values are refused: what comes after the parser (templates, schemas, `repr`) recurses, too."""

_DECODER = json.JSONDecoder()
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes, *, strict: bool = False) -> Any:
    """The value of a JSON text. strict: NaN and infinities are refused. Raises ValueError, never RecursionError."""
    try:
        value = json.loads(text, parse_constant=_refuse) if strict else json.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    return _checked(value)


def parse_json_prefix(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that stands at `start`, blanks aside, and where it ends. Errors as in `parse_json`."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    return _checked(value), end


def _checked(value: Any) -> Any:
    level, depth = [value], 0
    while level:
        level = [child for item in level for child in _children(item)]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_too_deep())
    return value


def _children(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


def _too_deep() -> str:
    return f"the JSON nests more than {MAX_DEPTH} levels deep"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def well_formed(value: Any) -> Any:
    """With U+FFFD in the place of halves of surrogate pairs, as every encoder of UTF-8 writes them: no tokenizer and no
    answer takes them, and an agent that cuts its texts to a length, or a model, may well cut an emoji in two."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [well_formed(item) for item in value]
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return value
