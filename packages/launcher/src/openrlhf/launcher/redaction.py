"""The one place that knows what is secret, and takes it out of everything that is printed or saved.

Secret is the value of a flag, variable, key or parameter whose name says so; the password of a URL; what looks like
the token of a known service; and every value that was remembered. Knows no command line and no flag by name.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from openrlhf.launcher.terms import with_flags

MASK = "***"

USER_ERRORS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError)
FAILED = 1

_LAST_WORDS = frozenset(
    [
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "apikey",
        "bearer",
        "authorization",
    ]
)
_BEFORE_KEY = frozenset(
    [
        "api",
        "access",
        "secret",
        "private",
        "auth",
        "encryption",
        "signing",
        "account",
        "storage",
        "subscription",
        "wandb",
    ]
)
_BEFORE_TOKEN = frozenset(
    [
        "pad",
        "eos",
        "bos",
        "unk",
        "sep",
        "cls",
        "mask",
        "image",
        "video",
        "audio",
        "end",
        "start",
        "stop",
        "special",
        "per",
        "max",
    ]
)
"""A token of a tokenizer or of a text is no secret."""
_WHOLE_NAMES = frozenset({"key", "token", "use_wandb"})

_SHAPES = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|wandb_v1_\w{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_NAME = r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)"
_URL = re.compile(r"(?<=://)(?P<user>[^\s/?#\"'@:]*)(?P<colon>:?)(?P<value>[^\s/?#\"']*)@")
_PAIR = re.compile(rf"(?P<before>^|[^\w.]){_NAME}=(?P<quote>[\"']?)(?P<value>(?<=[\"'])[^\"']+|[^\s&,;\"')\]}}]+)")
_WORDS = re.compile(rf"(?<=[\"']){_NAME}[\"'],?\s+[\"'](?P<value>[^\"']+)")
"""A flag and its value in a list of words, as errors print them: `'--x.key', 'value'`."""
_ENTRY = re.compile(rf"{_NAME}[\"']\s*:\s*(?P<quote>[\"'])(?P<value>(?:\\.|(?!(?P=quote))[^\\])*)")
_ESCAPED_ENTRY = re.compile(rf"{_NAME}\\+[\"']\s*:\s*\\+(?P<quote>[\"'])(?P<value>(?:(?!\\+(?P=quote)).)*)")
"""JSON inside of a quoted text."""
_HEADER = re.compile(r"(?i)\b(?:bearer|basic)\s+(?P<value>[\w.~+/=-]{8,})")

_SHORTEST = 6
_LONG = 8
"""Secrets of so many characters are taken out wherever they stand, shorter ones where they are a whole word."""

_remembered: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether the value of a flag, variable or key of this name is secret: `logger.wandb.key`, `HF_TOKEN`."""
    last = name.lstrip("-").rsplit(".", 1)[-1]
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", last)]
    if not words or last.lower() in _WHOLE_NAMES:
        return bool(words)
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in _BEFORE_TOKEN
    return words[-1] in _LAST_WORDS or (words[-1] == "key" and before in _BEFORE_KEY)


def redact(text: str, hidden: Iterable[str] = ()) -> str:
    """The text without secrets. hidden: further values that must not show, beside those that were remembered."""
    text = _without(text, {*_remembered, *hidden})
    return _replace(text, lambda secret: MASK)


def redact_value(name: str, value: Any) -> Any:
    """The value of a flag, variable or key, fit to be shown; JSON in a text keeps its form."""
    if isinstance(value, str):
        if value and is_secret_name(name):
            return MASK
        parsed = _json(value)
        if parsed is None:
            return redact(value)
        shown = redact_value("", parsed)
        return value if shown == parsed else json.dumps(shown, ensure_ascii=False)
    if isinstance(value, Mapping):
        return {key: redact_value(str(key), part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(redact_value(name, part) for part in value)
    return value


def find_secrets(name: str, value: Any) -> Iterator[str]:
    """Every secret in a value, as it stands there."""
    if isinstance(value, str):
        if value and is_secret_name(name):
            yield value
        elif (parsed := _json(value)) is not None:
            yield from find_secrets("", parsed)
        else:
            found: list[str] = []
            _replace(value, lambda secret: found.append(secret) or MASK)
            yield from found
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from find_secrets(str(key), part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from find_secrets(name, part)


def holds_mask(name: str, value: Any) -> bool:
    """Whether a value was saved without its secret: what stands in the secret's place is the mask."""
    return MASK in find_secrets(name, value)


def remember(secrets: Iterable[str]) -> None:
    """Take these values out of everything that this process prints from now on; very short ones are no secrets."""
    _remembered.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def remember_variables(environ: Mapping[str, str]) -> None:
    """Remember the values of the variables whose names say that they are secret; PWD is the shell's folder."""
    remember(value for name, value in environ.items() if is_secret_name(name) and name != "PWD")


def secrets_of_words(argv: Iterable[str]) -> list[str]:
    """Secrets of a command line in any state, also a wrong one: values after names that say so, and parts of values."""
    found: list[str] = []
    name = ""
    for arg in argv:
        head, _, attached = arg.partition("=")
        is_flag = arg.startswith("-") and not arg[1:2].isdigit()
        if is_flag or ("." in head and is_secret_name(head)):  # or a flag without its dashes
            name = head
            found += find_secrets(head, attached)
        else:
            found += find_secrets(name, arg)
    return found


def report_error(error: Exception) -> int:
    """Print the error, without secrets, to stderr and return the exit code.

    OPENRLHF_TRACEBACK=1 shows every traceback.
    """
    plain = isinstance(error, USER_ERRORS) or getattr(error, "user_message", False)
    if not plain or os.environ.get("OPENRLHF_TRACEBACK"):
        sys.stderr.write(traceback_text(error))
    sys.stderr.write(redact(with_flags(f"error: {error}\n")))
    sys.stderr.flush()
    return FAILED


def traceback_text(error: BaseException) -> str:
    """The traceback as Python prints it, without secrets."""
    return redact("".join(traceback.format_exception(error)))


def redact_uncaught() -> None:
    """Let Python print the traceback of an exception that nobody catches without secrets too."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        del kind, trace
        sys.stderr.write(traceback_text(error))

    sys.excepthook = hook


class RedactingFormatter(logging.Formatter):
    """Log lines without secrets, with flags in the place of the packages' own terms."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return redact(with_flags(super().format(record)))


def configure_logging(level: int, *, quiet: Iterable[str]) -> None:
    """Log to stderr from `level` on; the loggers named in `quiet` from warnings on."""
    logging.basicConfig(level=level)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    for name in quiet:
        logging.getLogger(name).setLevel(logging.WARNING)


def _without(text: str, values: Iterable[str]) -> str:
    for value in sorted({v for v in values if v.strip() and v not in ("--", MASK)}, key=len, reverse=True):
        whole = len(value) < _LONG
        left, right = (r"(?<![\w.-])", r"(?![\w-]|\.\w)") if whole else ("", "")
        for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}:
            text = re.sub(left + re.escape(form) + right, MASK, text)
    return text


def _replace(text: str, answer: Callable[[str], str]) -> str:
    """The text with `answer(secret)` in the place of each secret."""

    def user(match: re.Match[str]) -> str:
        if match["colon"] and match["value"]:
            return f"{match['user']}:{answer(match['value'])}@"
        return f"{answer(match['user'])}@" if match["user"] and not match["value"] else match[0]

    def named(match: re.Match[str]) -> str:
        if not match["value"] or not is_secret_name(match["name"]):
            return match[0]
        start = match.start("value") - match.start()
        return match[0][:start] + answer(match["value"]) + match[0][start + len(match["value"]) :]

    def pair(match: re.Match[str]) -> str:
        code = match["name"].lower() in ("key", "token") and match["before"] not in tuple("?&")
        return match[0] if code else named(match)  # `sorted(x, key=len)`

    text = _URL.sub(user, text)
    text = _PAIR.sub(pair, text)
    for pattern in (_ENTRY, _ESCAPED_ENTRY, _WORDS):
        text = pattern.sub(named, text)
    text = _HEADER.sub(lambda m: m[0].replace(m["value"], answer(m["value"])), text)
    return _SHAPES.sub(lambda m: answer(m[0]), text)


def _json(text: str) -> Any:
    """The object or list that a text spells; None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict | list) else None
