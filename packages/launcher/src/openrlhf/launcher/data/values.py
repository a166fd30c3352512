"""Values of tables as JSON has them: every container of rows gives the same values for the same data.

JSON has texts, numbers, booleans, null, lists and objects. What a table holds besides is text here: dates and times in
ISO 8601, decimals as they are spelled, numbers that are not finite as NaN, Infinity and -Infinity, bytes as UTF-8.
Bytes that are no text stay bytes (image files are such); where a text is expected they are refused. Serialisers that
libraries offer (pydantic's `to_jsonable_python`, say) refuse such bytes, and keep or drop every null alike.
"""

from __future__ import annotations

import datetime
import math
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from openrlhf.agents.chat.template import PromptError

_TIMES = (datetime.date, datetime.time)  # a datetime is a date


def json_value(value: Any) -> Any:
    """The value as JSON has it, without the null fields of objects (Arrow adds those); `content` stays, null or not."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else not_finite(value)
    if isinstance(value, Mapping):
        return {k: v if k == "bytes" else json_value(v) for k, v in value.items() if v is not None or k == "content"}
    if isinstance(value, list | tuple):
        return [json_value(v) for v in value]
    return _text(value)


def not_finite(value: float) -> str:
    """NaN, Infinity or -Infinity: as JavaScript spells them."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def check_label(value: Any) -> None:
    """PromptError for a label that holds bytes which are no text."""
    if isinstance(value, bytes):
        raise PromptError(f"expected a text, a number, a list or an object, got bytes that are no UTF-8: {value!r:.60}")
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        check_label(inner)


def _text(value: Any) -> Any:
    if isinstance(value, _TIMES):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return str(value) if isinstance(value, Decimal | datetime.timedelta | uuid.UUID) else value
