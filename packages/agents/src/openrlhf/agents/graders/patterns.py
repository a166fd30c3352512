"""Format answers: regular expressions, and JSON schemas (extra `[schema]`, nothing remote)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from openrlhf.agents.graders.limited import Helper
from openrlhf.agents.json_text import parse_json

MATCH_SECONDS = 1.0

# Keywords that the library reads beside another one (`then` with `if`), or that say nothing about what is valid.
SILENT = {
    "$schema", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs",
    "definitions", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format",
    "contentEncoding", "contentMediaType", "contentSchema", "then", "else", "minContains", "maxContains",
}  # fmt: skip


def matches(answer: str, pattern: str, *, whole: bool = False) -> bool:
    """The pattern is found (or, with `whole`, is the whole trimmed answer). Dots match newlines.

    An answer on which the pattern needs longer than a second (`(a+)+b` on many `a`) does not match. Raises ValueError
    for a pattern that is none.
    """
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is none: {error}") from error
    question = {"pattern": pattern, "text": answer.strip() if whole else answer, "whole": whole}
    return _helper.ask(question, MATCH_SECONDS) or False


_helper = Helper("pattern")


def valid_json(answer: str, schema: Mapping[str, Any] | None = None) -> bool:
    """The answer, or the last fenced block in it, is JSON that keeps the schema."""
    fenced = re.findall(r"```(?:json)?[^\S\n]*\n(.*?)```", answer, re.DOTALL)
    try:
        value = parse_json((fenced[-1] if fenced else answer).strip(), strict=True)
    except ValueError:
        return False
    return schema is None or not schema_errors(value, schema)


def schema_errors(value: Any, schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> list[str]:
    """What breaks the schema, one line each, in the dialect of its `$schema` (draft 2020-12 without one).

    Raises ValueError for a schema that is none: an unknown keyword (the standard would pass over `minimun`, and
    `lenient` does), a wrong type, a reference to another document (nothing is fetched) or to itself.
    """
    try:
        errors = _validator(json.dumps(schema), lenient).iter_errors(value)
        return [f"{error.json_path}: {error.message}" for error in errors]
    except (ValueError, ImportError):
        raise
    except Exception as error:  # references that lead nowhere or in a circle, patterns that are none
        raise ValueError(f"the schema cannot be checked ({type(error).__name__}: {error})") from error


@lru_cache(maxsize=64)
def _validator(text: str, lenient: bool) -> Any:
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry
    except ImportError as error:
        raise ImportError("jsonschema is not installed: pip install 'openrlhf-agents[schema]'") from error
    schema = json.loads(text)
    dialect = validator_for(schema, default=Draft202012Validator)
    known = {*dialect.VALIDATORS, *SILENT}
    for part in () if lenient else _parts(schema):
        if unknown := sorted(set(part) - known):
            raise ValueError(f"schema keyword {unknown[0]!r} is not supported; supported are {sorted(known)}")
    try:
        dialect.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is wrong at {error.json_path}: {error.message}") from error
    return dialect(schema, registry=Registry())  # without one of ours it would fetch what `$ref` names


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and the schemas in it."""
    from referencing import Resource
    from referencing.jsonschema import DRAFT202012

    resource: Any = Resource.from_contents(schema, default_specification=DRAFT202012)
    todo = [resource]
    while todo:
        part = todo.pop()
        if isinstance(part.contents, Mapping):
            yield part.contents
            todo += part.subresources()
