"""Command line and configuration file to typed configuration, with all mistakes reported at once.

Why no argparse and no tyro: the flags are already typed by the dataclasses, and three things that the command line
needs are foreign to both. Bare switches on top of a configuration file (a parser whose default is "on" offers only
the `no_` form), every mistake in one message instead of the first, and the rewriting of old command lines, which needs
the words before they are values. What remains of a parser is the short loop below; it costs a few milliseconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from openrlhf.agents.files import decode_text
from openrlhf.launcher.commands import (
    TRAIN_PPO_RAY,
    Command,
)
from openrlhf.launcher.flags import Flag, build
from openrlhf.launcher.old_correction import translate_correction
from openrlhf.launcher.old_names import old_name_problems
from openrlhf.launcher.redaction import MASK, holds_mask, redact, secrets_of_words
from openrlhf.launcher.suggestions import missing_dashes, unknown_flag, unknown_key, wrong_value
from openrlhf.launcher.terms import with_flags
from openrlhf.launcher.words import NOT_EXPANDED, Word, is_shell, split_words

C = TypeVar("C")

HELP = ("--help", "-h")
CONFIG = "config"
PRINT_CONFIG = "print_config"


class UsageError(ValueError):
    """Mistakes of the user in a command line: one message each, without secrets. argv: the words, if they are known."""

    def __init__(self, problems: Sequence[str], argv: Sequence[str] = ()) -> None:
        hidden = secrets_of_words(argv)
        self.problems = tuple(redact(problem, hidden) for problem in problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Parsed(Generic[C]):
    """A command line that was understood. `given` holds the paths of all fields that the user set."""

    config: C
    given: frozenset[str]
    print_config: bool = False


def parse(command: Command[C], argv: Sequence[str]) -> Parsed[C]:
    """Parse the words after the program's name; UsageError lists everything that is wrong with them."""
    words, problems = split_words(argv)
    problems += old_name_problems(command, words)
    words, wrong = translate_correction(words) if command is TRAIN_PPO_RAY else (words, [])
    problems += wrong
    values, print_config = {}, False
    for word in words:
        if word.name == CONFIG:
            if len(word.values) == 1:
                problems += _read_file(command, word.values[0], values, {w.name for w in words})
            else:
                problems.append("--config takes the path of one TOML file")
    for word in words:
        if word.name == PRINT_CONFIG:
            print_config = True
            problems += [f"--{PRINT_CONFIG} takes no value, got {v!r}" for v in word.values[:1]]
        elif word.name != CONFIG:
            problems += _read_word(command, word, values)
    given = frozenset(values)
    missing = [f for f in command.flags.values() if f.required and f.path not in given]
    problems += [f"{flag.option} is required: {flag.help}" for flag in missing]
    if not problems:
        problems = _impossible(command, values)
    if problems:
        raise UsageError(problems, argv)
    return Parsed(build(command.defaults, values), given, print_config)


def wants_help(argv: Sequence[str]) -> bool:
    """Whether the command line asks for its help."""
    return any(word in HELP for word in argv)


def _impossible(command: Command, values: Mapping[str, Any]) -> list[str]:
    """What the sections themselves refuse, one message per value."""
    problems: list[str] = []
    for path, value in values.items():
        try:
            build(command.defaults, {path: value})
        except ValueError as error:
            problems.append(with_flags(str(error)))
    return problems


def _read_word(command: Command, word: Word, values: dict[str, Any]) -> list[str]:
    flag = command.flags.get(word.name)
    if flag is None:
        return unknown_flag(command, word.name)
    if flag.shape.base is str and "template" not in flag.name:  # any other type refuses such a value below
        left = [f"{flag.option} {value!r} {NOT_EXPANDED}" for value in word.values if is_shell(value)]
        if left:
            return left
    try:
        values[flag.path] = flag.parse(word.values)
    except ValueError as error:
        return [f"{flag.option} {wrong_value(flag, error)}{missing_dashes(command, word.values)}"]
    return []


def _read_file(command: Command, name: str, values: dict[str, Any], given: Set[str]) -> list[str]:
    path = Path(name)
    if not path.is_file():
        return [f"--config: there is no file {str(path.absolute())!r}"]
    try:
        content = tomllib.loads(decode_text(path.read_bytes()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return [f"--config {name}: not a TOML file: {error}"]
    problems: list[str] = []
    for key, value in _flatten(content):
        flag = command.flags.get(key)
        if flag is None or flag.off:
            problems += [f"--config {name}: {problem}" for problem in unknown_key(command, key)]
            continue
        if not (flag.name in given and holds_mask(flag.path, value)):  # the command line says the secret
            problems += [f"--config {name}: {problem}" for problem in _read_value(flag, value, values)]
    return problems


def _read_value(flag: Flag, value: Any, values: dict[str, Any]) -> list[str]:
    if flag.secret and value == MASK:
        return []
    if holds_mask(flag.path, value):
        return [f"{flag.name} was saved without its secret ({MASK}): give {flag.option} on the command line"]
    try:
        values[flag.path] = flag.shape.coerce(value)
    except ValueError as error:
        return [f"{flag.name} {wrong_value(flag, error)}"]
    return []


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in tables.items():
        flat += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(prefix + key, value)]
    return flat
