"""A command line as words: each flag with the values that follow it. Knows no flag by name."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """`--name values...` as it stood on the command line."""

    name: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shlex.join([f"--{self.name}", *self.values])


def split_words(argv: Sequence[str]) -> tuple[list[Word], list[str]]:
    """Group the arguments by flag; the second list says what could not be grouped.

    A flag starts with two dashes, everything up to the next flag are its values (`-1` too). `--name=value` gives the
    one value `value`, which may then start with two dashes itself.
    """
    words: list[Word] = []
    problems: list[str] = []
    for arg in argv:
        if arg.startswith("--") and len(arg) > 2:
            name, equals, value = arg[2:].partition("=")
            words.append(Word(name, (value,) if equals else ()))
        elif not words:
            problems.append(f"{arg!r} stands before the first flag; every option has a name, such as --train.seed 1")
        else:
            words[-1] = Word(words[-1].name, (*words[-1].values, arg))
    return words, problems
