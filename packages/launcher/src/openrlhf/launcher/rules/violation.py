"""One broken rule, and the words for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from openrlhf.launcher.machine import Machine
from openrlhf.launcher.redaction import redact_value
from openrlhf.launcher.terms import with_flags
from openrlhf.learner.constraints import Conflict


@dataclass(frozen=True)
class Violation:
    """What is wrong with which flags and how to mend it.

    flags: (name, value) of every flag involved. problem: why they do not fit. fix: what to write instead.
    """

    flags: tuple[tuple[str, Any], ...]
    problem: str
    fix: str

    def __str__(self) -> str:
        settings = [setting(name, value) for name, value in self.flags]
        named = ", ".join(settings[:-1]) + " and " + settings[-1] if len(settings) > 1 else settings[0]
        return f"{named}: {self.problem}. Fix: {self.fix}."


Rule = Callable[[Any, Machine], Iterator[Violation]]
"""A rule takes a resolved configuration and yields what is wrong with it, which is usually nothing."""


def broken(config: object, names: str, problem: str, fix: str) -> Violation:
    """A violation by the flags named in `names` (separated by spaces), with the values they have."""
    return Violation(tuple((name, value_at(config, name)) for name in names.split()), problem, fix)


def conflicting(config: object, conflict: Conflict, places: Mapping[str, str]) -> Violation:
    """A conflict of the learner's parameters, by their flags. places: how a parameter begins -> how its flag does."""

    def path(name: str) -> str:
        return next((flag + name.removeprefix(own) for own, flag in places.items() if name.startswith(own)), name)

    return broken(config, " ".join(map(path, conflict.names)), conflict.problem, with_flags(conflict.fix, places))


def value_at(config: object, path: str) -> Any:
    """The value of a field by its dotted path."""
    return reduce(getattr, path.split("."), config)


def setting(name: str, value: Any) -> str:
    """A flag with its value as the user would write it, without secrets; a switch has none."""
    value = redact_value(name, value)
    if value is True:
        return f"--{name}"
    if value is False or value is None:
        return f"no --{name}"
    if isinstance(value, tuple):
        return f"--{name} {' '.join(str(v) for v in value)}"
    return f"--{name} {value!r}" if value == "" or (isinstance(value, str) and " " in value) else f"--{name} {value}"
