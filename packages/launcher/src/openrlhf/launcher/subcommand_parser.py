"""The argument parser of `openrlhf-launch`'s subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from openrlhf.launcher.redaction import redact, secrets_of_words


class SubcommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, whose error messages hold no secret of the command line."""

    def __init__(self, prog: str, description: str, usage: str | None = None) -> None:
        super().__init__(prog=f"openrlhf-launch {prog}", description=description, usage=usage, allow_abbrev=False)
        self._words: Sequence[str] = ()

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  the overloads are argparse's own
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's; the words are kept for `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(self._words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        super().error(redact(message, secrets_of_words(self._words)))


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first `--`."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]
