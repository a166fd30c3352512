"""One broken rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """What is wrong with which flags and how to mend it.

    flags: (name, value) of every flag involved. problem: why they do not fit. fix: what to write instead.
    """

    flags: tuple[tuple[str, Any], ...]
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{' and '.join(setting(name, value) for name, value in self.flags)}: {self.problem}. Fix: {self.fix}."


def setting(name: str, value: Any) -> str:
    """A flag with its value as the user would write it; a switch has none."""
    if value is True:
        return f"--{name}"
    if value is False or value is None:
        return f"no --{name}"
    if isinstance(value, tuple):
        return f"--{name} {' '.join(str(v) for v in value)}"
    return f"--{name} {value}"
