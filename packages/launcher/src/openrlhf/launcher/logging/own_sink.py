"""A logger of the user's (`--logger.path`): a class with the methods of `Sink`, in a file or an importable module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from openrlhf.agents.files import CodeFileError, read_code
from openrlhf.agents.modules import load_module
from openrlhf.launcher.logging.sinks import RunIdentity, Sink, UnusableSinkError

FLAG = "--logger.path"
METHODS: dict[str, tuple[str, ...]] = {
    "resume": ("step",),
    "log_step": ("step", "metrics"),
    "log_evaluation": ("step", "metrics"),
    "log_samples": ("step", "samples"),
    "close": (),
}
MakeSink = Callable[[Mapping[str, Any], RunIdentity], Sink]


def load_sink(path: str) -> MakeSink:
    """The class that `file.py:Class` or `module:Class` names; it is called with all flags and the run's identity.

    Raises UnusableSinkError with what is missing.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not name.isidentifier():
        raise UnusableSinkError(f"{FLAG} {path!r}: give file.py:Class or module:Class")
    try:
        module = load_module(read_code(place, FLAG)) if place.endswith(".py") else importlib.import_module(place)
    except CodeFileError as error:
        raise UnusableSinkError(str(error)) from error
    except Exception as error:  # whatever the user's module raises
        raise UnusableSinkError(f"{FLAG} {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    kind = getattr(module, name, None)
    if not inspect.isclass(kind):
        raise UnusableSinkError(f"{FLAG} {path!r}: {place} has no class {name}")
    problem = _missing(kind)
    if problem:
        raise UnusableSinkError(f"{FLAG} {path!r}: {name} {problem}")
    return cast(MakeSink, kind)


def _missing(kind: type) -> str:
    """What it lacks of a `Sink`, as a clause; empty where nothing."""
    if not isinstance(getattr(kind, "name", None), str):
        return "has no `name` (a text, for warnings)"
    for method, arguments in {"__init__": ("config", "run"), **METHODS}.items():
        function = getattr(kind, method, None)
        expected = f"{method}({', '.join(('self', *arguments))})"
        if not callable(function):
            return f"has no {expected}"
        try:
            inspect.signature(function).bind(None, *arguments)
        except TypeError as error:
            return f"has no {expected}: {error}"
    return ""
