"""Rubrics of judges: a TOML file with the messages that a judge gets, and how its answer becomes a score.

Example::

    system = "You grade answers to questions of mathematics."
    user = '''
    Question: {{ prompt }}
    Reference: {{ label }}
    Answer: {{ response }}
    How good is the answer, from 1 to 10? End with "Score: N".
    '''
    [score]
    by = "regex"
    pattern = 'Score:\\s*(\\d+)'
    range = [1, 10]
    to = [0, 1]
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openrlhf.agents.json_text import parse_json_prefix
from openrlhf.agents.values import as_number

WAYS = ("regex", "json", "last_number", "choices")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_TEMPLATES = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class RubricError(ValueError):
    """A rubric cannot be used; the message says what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """How an answer becomes a score.

    by: "regex" (the first group of the last match of `pattern`), "json" (`key` of the last JSON object that has it),
    "last_number", or "choices" (the last word of the answer that is one of them, by its value). range: scores outside
    of it cannot be read; to: what its ends become.
    """

    by: str
    pattern: str = ""
    key: str = "score"
    choices: Mapping[str, float] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    to: tuple[float, float] | None = None

    def read(self, answer: str) -> float | None:
        """The score; None where the answer has none."""
        value = {"regex": self._matched, "json": self._in_json, "last_number": _last_number, "choices": self._chosen}[
            self.by
        ](answer)
        if value is None or not math.isfinite(value):
            return None
        if self.range is None:
            return value
        low, high = self.range
        if not low <= value <= high:
            return None
        bottom, top = self.to or self.range
        return bottom + (value - low) / (high - low) * (top - bottom)

    def _matched(self, answer: str) -> float | None:
        found = [match[1] for match in re.finditer(self.pattern, answer)]
        return _as_float(found[-1]) if found else None

    def _in_json(self, answer: str) -> float | None:
        value, start = None, answer.find("{")
        while start >= 0:
            try:
                found, end = parse_json_prefix(answer, start)
            except ValueError:
                end = start + 1
            else:
                value = _as_float(found[self.key]) if self.key in found else value
            start = answer.find("{", end)
        return value

    def _chosen(self, answer: str) -> float | None:
        names = sorted(self.choices, key=len, reverse=True)
        found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", answer)
        return self.choices[found[-1]] if found else None


@dataclass(frozen=True, kw_only=True)
class Rubric:
    """What a judge is asked, as Jinja templates, and how its answer is read.

    Placeholders: prompt, response, label, and columns.NAME for the other columns of the prompt that travel.
    """

    user: str
    system: str = ""
    score: ScoreRule

    def messages(self, **values: Any) -> list[dict[str, str]]:
        """The chat that a judge is asked with. Raises RubricError where a placeholder has no value."""
        try:
            texts = {"system": self.system, "user": self.user}
            written = {role: _TEMPLATES.from_string(text).render(values) for role, text in texts.items() if text}
        except TemplateError as error:
            raise RubricError(f"its text cannot be written: {error}") from error
        return [{"role": role, "content": text} for role, text in written.items()]

    def try_out(self, columns: Sequence[str]) -> None:
        """Raises RubricError where a placeholder is no name of these columns, nor of what every sample has."""
        self.messages(prompt="", response="", label="", columns=dict.fromkeys(columns, ""))


def read_rubric(text: str, columns: Sequence[str] | None = ()) -> Rubric:
    """The rubric of a TOML file's text, tried out with every placeholder. Raises RubricError.

    columns: those that travel with the prompts; None: not known yet, so that nothing is tried out.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RubricError(f"it is no TOML: {error}") from error
    rule = content.pop("score", None)
    unknown = sorted(set(content) - {"system", "user"})
    if unknown:
        raise RubricError(f"it has {unknown[0]!r}; expected system, user and a table [score]")
    if not isinstance(content.get("user"), str) or not isinstance(content.get("system", ""), str):
        raise RubricError("`user` must be a text: what the judge is asked")
    rubric = Rubric(user=content["user"], system=content.get("system", ""), score=_read_rule(rule))
    if columns is not None:
        rubric.try_out(columns)
    return rubric


def _read_rule(table: Any) -> ScoreRule:
    if not isinstance(table, Mapping) or table.get("by") not in WAYS:
        raise RubricError(f"[score] must say how a score is found: by = one of {', '.join(WAYS)}")
    unknown = sorted(set(table) - {part.name for part in fields(ScoreRule)})
    if unknown:
        raise RubricError(f"[score] has {unknown[0]!r}; it knows {', '.join(part.name for part in fields(ScoreRule))}")
    values = dict(table)
    for name in ("range", "to"):
        if name in values:
            values[name] = _pair(name, values[name])
    if "to" in values and "range" not in values:
        raise RubricError("[score] to: without `range` nothing says what it replaces")
    if values["by"] == "regex":
        _check_pattern(values.get("pattern"))
    if values["by"] == "choices":
        values["choices"] = _choices(values.get("choices"))
    if not isinstance(values.get("key", ""), str):
        raise RubricError("[score] key: the name of a field of the JSON object")
    return ScoreRule(**values)


def _pair(name: str, value: Any) -> tuple[float, float]:
    numbers = [as_number(item) for item in value] if isinstance(value, list) else []
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None or (name == "range" and numbers[0] >= numbers[1]):
        raise RubricError(f"[score] {name} must be two numbers, as in [0, 1], got {value!r}")
    return numbers[0], numbers[1]


def _check_pattern(pattern: Any) -> None:
    try:
        groups = re.compile(pattern).groups if isinstance(pattern, str) else 0
    except re.error as error:
        raise RubricError(f"[score] pattern: {error}") from error
    if not groups:
        raise RubricError("[score] pattern: a regular expression with a group around the number, as in 'Score: (\\d+)'")


def _choices(table: Any) -> dict[str, float]:
    values = {name: as_number(value) for name, value in table.items()} if isinstance(table, Mapping) else {}
    numbers = {name: value for name, value in values.items() if value is not None and name}
    if not numbers or len(numbers) != len(values):
        raise RubricError("[score] choices: a table of words and their numbers, as in { good = 1, bad = 0 }")
    return numbers


def _last_number(answer: str) -> float | None:
    found = _NUMBER.findall(answer)
    return float(found[-1]) if found else None


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
