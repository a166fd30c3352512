"""A command line as words: each flag with the values that follow it. Knows no flag by name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_SHELL = re.compile(r"\$\{\w[^}]*\}|\$\(|(?:^|/)\$[A-Za-z_]\w*|^`.+`$")
NOT_EXPANDED = "is an expression that the shell did not expand (within single quotes?): give its value"


def is_shell(text: str) -> bool:
    """Whether a word holds an expression of the shell: `$((N))`, `${ARGS[@]}`, `$NAME`, `$(program)`."""
    return _SHELL.search(text) is not None


def shell_arithmetic(text: str) -> str:
    """A number or expression as it stands inside of `$((...))`."""
    return text[3:-2].strip() if text.startswith("$((") and text.endswith("))") else text


def quoted(text: str) -> str:
    """The word as a shell takes it; an expression of the shell stays one."""
    return f'"{text}"' if is_shell(text) and '"' not in text else shlex.quote(text)


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
            named = "stands before the first flag; every option has a name, such as --train.seed 1"
            problems.append(f"{arg!r} {NOT_EXPANDED if is_shell(arg) else named}")
        else:
            words[-1] = Word(words[-1].name, (*words[-1].values, arg))
    return words, problems
