"""What a row of the check gives back. Imports no ML library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class CheckError(RuntimeError):
    """What a row checks is not so."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A row that is fine. detail: what was seen, in a few words. numbers: measured, by name with the unit in it."""

    detail: str
    numbers: dict[str, float] = field(default_factory=dict)


Check = Callable[[Path], Outcome]
"""A row's function. It gets an empty folder for models; raises CheckError, or anything, when the row fails."""
