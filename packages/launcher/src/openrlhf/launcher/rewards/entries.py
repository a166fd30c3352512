"""`--reward.remote_url` and its weights, read: which sources of rewards there are, and what each of them is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openrlhf.launcher.redaction import redact

JUDGE_SERVER = "openai:"
"""What the URL of a judge begins with."""
JUDGE_HERE = "judge"
"""In the place of a URL: the judge that runs in the cluster."""
_NAME = r"[A-Za-z][\w-]*"
_NAMED = re.compile(rf"{_NAME}=")
_NEXT = re.compile(rf"\s+(?={_NAME}=)")

Kind = Literal["file", "servers", "judge"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One source. name: "" for one that is alone and has none. place: a path, or URLs separated by commas."""

    name: str
    place: str
    weight: float = 1.0

    @property
    def kind(self) -> Kind:
        """What answers: a function in a Python file, servers of the reward protocol, or a model as a judge."""
        if self.place.endswith(".py"):
            return "file"
        return "judge" if self.here or self.place.startswith(JUDGE_SERVER) else "servers"

    @property
    def here(self) -> bool:
        """Whether it is the judge on engines of this run."""
        return self.place == JUDGE_HERE

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers of the reward protocol, or of a judge."""
        text = self.place.removeprefix(JUDGE_SERVER)
        return tuple(part.strip() for part in re.split(r"[,\s]+", text) if part.strip())


def read_entries(text: str | None, weights: Sequence[str] = ()) -> list[Entry]:
    """The sources in their order. Raises ValueError with what is wrong."""
    text = (text or "").strip()
    if not text:
        return []
    pieces = _NEXT.split(text)
    if not _NAMED.match(pieces[0]):
        if len(pieces) > 1:
            shown = [redact(piece) for piece in pieces[:2]]
            raise ValueError(f"{shown[0]!r} has no name and {shown[1]!r} has one; name all of them, as in math=math.py")
        if weights:
            raise ValueError("a weight belongs to a source with a name, as in math=math.py")
        return [Entry(name="", place=text)]
    named = [piece.partition("=")[::2] for piece in pieces]
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several sources have the name {twice[0]!r}")
    if empty := [name for name, place in named if not place.strip()]:
        raise ValueError(f"{empty[0]}= has no source after it")
    given = named_values(weights, names)
    return [Entry(name=name, place=place.strip(), weight=_number(name, given.get(name, "1"))) for name, place in named]


def named_values(words: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words by name. Raises ValueError for another form, and for a name that is not among `names`."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"{word!r} is no NAME=VALUE")
        if name not in names:
            raise ValueError(f"{word!r}: no source has the name {name!r}; there are {', '.join(names)}")
        if name in values:
            raise ValueError(f"{word!r}: {name!r} has a value already")
        values[name] = value
    return values


def _number(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"the weight of {name!r} is {text!r}, which is no number")
    return weight
