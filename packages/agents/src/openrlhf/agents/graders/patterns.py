"""Format answers: regular expressions and JSON schemas (the keywords that describe answers, nothing remote)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from openrlhf.agents.json_text import parse_json

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v.is_integer()),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
}
ANNOTATIONS = {"$schema", "$id", "title", "description", "default", "examples", "format"}


def matches(answer: str, pattern: str, *, whole: bool = False) -> bool:
    """The pattern is found (or, with `whole`, is the whole trimmed answer). Dots match newlines."""
    expression = re.compile(pattern, re.DOTALL)
    return bool(expression.fullmatch(answer.strip()) if whole else expression.search(answer))


def valid_json(answer: str, schema: Mapping[str, Any] | None = None) -> bool:
    """The answer, or the last fenced block in it, is JSON that keeps the schema."""
    fenced = re.findall(r"```(?:json)?[^\S\n]*\n(.*?)```", answer, re.DOTALL)
    try:
        value = parse_json((fenced[-1] if fenced else answer).strip(), strict=True)
    except ValueError:
        return False
    return schema is None or not schema_errors(value, schema)


def schema_errors(value: Any, schema: Mapping[str, Any] | bool, path: str = "$") -> list[str]:
    """What breaks the schema, one line each. ValueError for a keyword that is not supported."""
    if isinstance(schema, bool):
        return [] if schema else [f"{path}: nothing is allowed here"]
    errors: list[str] = []
    for keyword, argument in schema.items():
        if keyword in ANNOTATIONS:
            continue
        check = CHECKS.get(keyword)
        if check is None:
            raise ValueError(f"schema keyword {keyword!r} is not supported; supported are {sorted(CHECKS)}")
        errors.extend(check(value, argument, schema, path))
    return errors


def _type(value: Any, names: Any, _schema: Any, path: str) -> list[str]:
    allowed = [names] if isinstance(names, str) else list(names)
    return [] if any(TYPES[name](value) for name in allowed) else [f"{path}: {value!r} is no {' or '.join(allowed)}"]


def _properties(value: Any, properties: Mapping[str, Any], _schema: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [e for k, s in properties.items() if k in value for e in schema_errors(value[k], s, f"{path}.{k}")]


def _required(value: Any, names: list[str], _schema: Any, path: str) -> list[str]:
    return [f"{path}: {n!r} is missing" for n in names if n not in value] if isinstance(value, dict) else []


def _additional(value: Any, allowed: Any, schema: Mapping[str, Any], path: str) -> list[str]:
    if not isinstance(value, dict):
        return []
    others = [k for k in value if k not in schema.get("properties", {})]
    return [e for k in others for e in schema_errors(value[k], allowed, f"{path}.{k}")]


def _items(value: Any, schema: Any, _parent: Any, path: str) -> list[str]:
    if not isinstance(value, list):
        return []
    return [e for i, item in enumerate(value) for e in schema_errors(item, schema, f"{path}[{i}]")]


def _compare(words: str, kinds: tuple[type, ...], size: Callable[[Any], Any], ok: Callable[[Any, Any], bool]) -> Any:
    def check(value: Any, limit: Any, _schema: Any, path: str) -> list[str]:
        if not isinstance(value, kinds) or isinstance(value, bool) or ok(size(value), limit):
            return []
        return [f"{path}: {value!r} {words} {limit!r}"]

    return check


def _equal(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _branches(value: Any, schemas: list[Any], path: str) -> int:
    return sum(not schema_errors(value, schema, path) for schema in schemas)


def _same(value: Any) -> Any:
    return value


CHECKS: dict[str, Callable[[Any, Any, Any, str], list[str]]] = {
    "type": _type,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    "items": _items,
    "enum": lambda v, a, s, p: [] if any(_equal(v, x) for x in a) else [f"{p}: {v!r} is none of {a!r}"],
    "const": lambda v, a, s, p: [] if _equal(v, a) else [f"{p}: {v!r} is not {a!r}"],
    "pattern": _compare("does not match", (str,), _same, lambda v, a: re.search(a, v) is not None),
    "minimum": _compare("is below", (int, float), _same, lambda v, a: v >= a),
    "maximum": _compare("is above", (int, float), _same, lambda v, a: v <= a),
    "exclusiveMinimum": _compare("is not above", (int, float), _same, lambda v, a: v > a),
    "exclusiveMaximum": _compare("is not below", (int, float), _same, lambda v, a: v < a),
    "minLength": _compare("is shorter than", (str,), len, lambda v, a: v >= a),
    "maxLength": _compare("is longer than", (str,), len, lambda v, a: v <= a),
    "minItems": _compare("has fewer items than", (list,), len, lambda v, a: v >= a),
    "maxItems": _compare("has more items than", (list,), len, lambda v, a: v <= a),
    "allOf": lambda v, a, s, p: [e for x in a for e in schema_errors(v, x, p)],
    "anyOf": lambda v, a, s, p: [] if _branches(v, a, p) else [f"{p}: {v!r} fits none of anyOf"],
    "oneOf": lambda v, a, s, p: [] if _branches(v, a, p) == 1 else [f"{p}: {v!r} does not fit exactly one of oneOf"],
    "not": lambda v, a, s, p: [f"{p}: {v!r} is not allowed"] if not schema_errors(v, a, p) else [],
}
