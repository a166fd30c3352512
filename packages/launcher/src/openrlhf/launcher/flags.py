"""Flags, read off a configuration dataclass: name, type, default and help of each. Parses and formats single values.

Knows nothing of command lines (that is `parsing.py`) nor of any particular flag.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union

from openrlhf.launcher.redaction import MASK, is_secret_name, redact_value

ANY_NUMBER = -1
"""Count of a flag that takes zero or more values."""

_NOUNS = {int: "a whole number", float: "a number", str: "a text"}

C = TypeVar("C")


class ChoiceError(ValueError):
    """A value that is none of a flag's choices."""

    def __init__(self, value: str, choices: Sequence[str]) -> None:
        super().__init__(f"takes one of {', '.join(choices)}, got {value!r}")
        self.value, self.choices = value, choices


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What values a flag takes: `count` values of type `base`; no value at all for a switch (`base` bool)."""

    base: type
    count: int = 1
    optional: bool = False
    choices: tuple[str, ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    meanings: str = ""
    """What the choices mean, where a table has them."""
    joined: bool = False
    """Whether several words are one text, with a space between every two."""

    @property
    def hint(self) -> str:
        """How `--help` shows the values, for example `FLOAT FLOAT` or `{adam,muon}`."""
        if self.base is bool:
            return ""
        one = "{" + ",".join(self.choices) + "}" if self.choices else self.base.__name__.upper()
        one = "|".join([*self.words, one])
        text = f"[{one} ...]" if self.count == ANY_NUMBER or self.joined else " ".join([one] * self.count)
        return f"None|{text}" if self.optional else text

    def parse(self, tokens: Sequence[str]) -> Any:
        """Turn the command line's words into the field's value; ValueError says what was expected."""
        if self.base is bool:
            if tokens:
                raise ValueError(f"is a switch and takes no value, got {' '.join(tokens)!r}: write it alone")
            return True
        if len(tokens) == 1 and self.optional and tokens[0] == "None":
            return None
        if len(tokens) == 1 and tokens[0] in self.words:
            return self.words[tokens[0]]
        if self.joined and tokens:
            tokens = [" ".join(tokens)]
        if self.count not in (ANY_NUMBER, len(tokens)):
            raise ValueError(f"takes {_plural(self.count)}, got {self._got(tokens)}")
        values = tuple(self._one(token) for token in tokens)
        return values[0] if self.count == 1 else values

    def _got(self, tokens: Sequence[str]) -> str:
        got = "none" if not tokens else f"{len(tokens)}: {' '.join(repr(t) for t in tokens)}"
        commas = len(tokens) == 1 and len(tokens[0].split(",")) == self.count
        return f"{got}; separate them by a space, not a comma" if commas else got

    def _one(self, token: str) -> Any:
        if self.choices and token not in self.choices:
            raise ChoiceError(token, self.choices)
        try:
            value = self.base(token)
        except ValueError:
            raise ValueError(f"takes {_NOUNS[self.base]}, got {token!r}") from None
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"takes a number, got {token!r}")
        return value

    def coerce(self, value: Any) -> Any:
        """Check a value that a configuration file gave (already typed by TOML); ValueError says what was expected."""
        if self.base is bool:
            if not isinstance(value, bool):
                raise ValueError(f"is a switch and takes true or false, got {value!r}")
            return value
        many = list(value) if isinstance(value, list | tuple) else [value]
        for item in many:
            numeric = self.base in (int, float) and isinstance(item, int | float)
            if isinstance(item, bool) or not (numeric or isinstance(item, str)):
                raise ValueError(f"takes {_NOUNS[self.base]}, got {item!r}")
        return self.parse([item if isinstance(item, str) else repr(item) for item in many])


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a command. `path` is the field it sets: `name` except for the `no_` form of a switch that is on."""

    name: str
    path: str
    shape: Shape
    default: Any
    owner: type
    required: bool = False
    off: bool = False

    @property
    def option(self) -> str:
        """The flag as the user writes it."""
        return f"--{self.name}"

    @property
    def section(self) -> str:
        """First part of the name; empty for a flat flag."""
        return self.name.split(".")[0] if "." in self.name else ""

    @property
    def secret(self) -> bool:
        """Whether its value must never be printed or saved."""
        return is_secret_name(self.path)

    @property
    def help(self) -> str:
        """The docstring under the field, and what its choices mean."""
        if self.off:
            return f"Switches --{self.path} off."
        return f"{field_help(self.owner, self.path.rsplit('.', 1)[-1])} {self.shape.meanings}".rstrip()

    def parse(self, tokens: Sequence[str]) -> Any:
        """The value that these words of the command line mean."""
        value = self.shape.parse(tokens)
        return not value if self.off else value

    def show(self, value: Any) -> str:
        """The value as the user would write it on the command line, secrets masked."""
        if self.secret and value is not None:
            return MASK
        value = redact_value(self.path, value)
        for word, meaning in self.shape.words.items():
            if value == meaning:
                return word
        if isinstance(value, tuple):
            return " ".join(str(v) for v in value)
        return repr(value) if isinstance(value, str) and (not value or "\n" in value or " " in value) else str(value)


def flags_of(config: object, *, hidden: Callable[[str], bool] = lambda path: False) -> dict[str, Flag]:
    """All flags of a configuration, by name. `config` is an instance that holds the defaults."""
    flags: dict[str, Flag] = {}
    for path, owner, spec, value in _leaves(config, ""):
        if hidden(path):
            continue
        shape = _shape(_hints(owner)[spec.name], spec.metadata.get("words", {}), spec.metadata.get("choices", {}))
        shape = dataclasses.replace(shape, joined=bool(spec.metadata.get("joined")))
        required = bool(spec.metadata.get("required"))
        flags[path] = Flag(name=path, path=path, shape=shape, default=value, owner=owner, required=required)
        if value is True:
            head, _, last = path.rpartition(".")
            name = f"{head}.no_{last}" if head else f"no_{last}"
            flags[name] = Flag(name=name, path=path, shape=shape, default=value, owner=owner, off=True)
    return flags


def values_of(config: object) -> dict[str, Any]:
    """All leaf values of a configuration, by dotted path."""
    return {path: value for path, _, _, value in _leaves(config, "")}


def build(config: C, values: Mapping[str, Any]) -> C:
    """A copy of `config` in which the fields named by dotted paths have new values."""
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    for head, inner in nested.items():
        changes[head] = build(getattr(config, head), inner)
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue]


@functools.cache
def field_help(owner: type, name: str) -> str:
    """The docstring under field `name`, in `owner` or the nearest base class that has one, as one line."""
    for cls in owner.__mro__:
        text = _module_docstrings(cls.__module__).get((cls.__name__, name))
        if text:
            return " ".join(text.split())
    return ""


@functools.cache
def _module_docstrings(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> docstring, for the classes of a module. Python keeps no such docstrings, the source does."""
    source = inspect.getsource(sys.modules[module]) if module != "builtins" else ""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for here, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):  # noqa: SIM102
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    found[node.name, here.target.id] = str(after.value.value)
    return found


def _leaves(config: object, prefix: str) -> Iterator[tuple[str, type, dataclasses.Field[Any], Any]]:
    for spec in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{spec.name}.")
        else:
            yield f"{prefix}{spec.name}", type(config), spec, value


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def _shape(annotation: Any, words: Mapping[str, Any], table: Mapping[str, Any]) -> Shape:
    """table: the rows by name where these are the values of the flag, each with a `help`."""
    if table:
        return Shape(base=str, choices=tuple(table), meanings=" ".join(f"{n}: {row.help}." for n, row in table.items()))
    optional = False
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        assert len(members) == 1, f"a flag has one type and None at most, got {annotation}"
        annotation, optional = members[0], True
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return Shape(base=str, optional=optional, choices=args, words=words)
    if origin is tuple:
        count = ANY_NUMBER if args[-1] is Ellipsis else len(args)
        return Shape(base=args[0], count=count, optional=optional, words=words)
    assert annotation in (bool, int, float, str), f"no flag can have the type {annotation}"
    return Shape(base=annotation, optional=optional, words=words)


def _plural(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"
