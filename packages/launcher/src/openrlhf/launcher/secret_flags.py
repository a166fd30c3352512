"""Flags whose values are secret, handed to the trainer by a variable: others can read command lines and scripts."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence

from openrlhf.launcher.redaction import find_secrets
from openrlhf.launcher.words import Word, split_words

VARIABLE = "OPENRLHF_SECRET_FLAGS"
"""Words of a command line, as a JSON list. Read and removed by the trainer, whose own words come first."""


def split_secret_flags(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """(words that may be seen, words of flags with a secret value). Of a flag given twice the last one counts."""
    words, _ = split_words(flags)
    last = {word.name: word for word in words}
    hidden = [word for word in last.values() if _is_secret(word)]
    names = {word.name for word in words if _is_secret(word)}
    kept = [word for word in words if word.name not in names or (word is last[word.name] and word not in hidden)]
    return [part for word in kept for part in _parts(word)], [part for word in hidden for part in _parts(word)]


def take_secret_flags(environ: MutableMapping[str, str]) -> list[str]:
    """The words that were handed over; nobody after this process inherits them."""
    return list(json.loads(environ.pop(VARIABLE, "[]")))


def as_variable(words: Sequence[str]) -> dict[str, str]:
    """What to add to the trainer's environment."""
    return {VARIABLE: json.dumps(list(words))} if words else {}


def _is_secret(word: Word) -> bool:
    return any(any(find_secrets(word.name, value)) for value in word.values)


def _parts(word: Word) -> list[str]:
    if len(word.values) == 1 and word.values[0].startswith("--"):
        return [f"--{word.name}={word.values[0]}"]
    return [f"--{word.name}", *word.values]
