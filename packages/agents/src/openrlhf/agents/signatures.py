"""Whether an author's class can be called as executors call it; found out before anything starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from openrlhf.agents.files import CodeFileError

EXECUTE = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")


def check_agent_class(agent_class: Callable[[], Any]) -> None:
    """Raises CodeFileError unless `agent_class()` can be called and gives something with reset and step."""
    if not callable(agent_class):
        raise CodeFileError(f"MultiTurnAgentExecutor takes an agent class, not an instance or {agent_class!r}")
    if not inspect.isclass(agent_class):
        return  # a function that makes agents: what it gives is seen then
    name = agent_class.__name__
    if inspect.isabstract(agent_class):
        missing = sorted(getattr(agent_class, "__abstractmethods__", ()))
        raise CodeFileError(f"agent class {name} does not implement {missing}")
    _check_call(agent_class, (), f"agent class {name} is made without arguments, one for each sample")
    for method in ("reset", "step"):
        function = inspect.getattr_static(agent_class, method, None)
        if function is None:
            raise CodeFileError(f"agent class {name} has no {method}(self, states)")
        if inspect.isfunction(function):
            _check_call(function, ("self", "states"), f"agent class {name}: expected {method}(self, states)")


def check_execute(execute: Callable[..., Any]) -> None:
    """Raises CodeFileError unless an executor's `execute` takes what it is given."""
    if not _binds(execute, EXECUTE) and not by_position(execute):
        raise CodeFileError(f"expected execute(self, {', '.join(EXECUTE)}), found execute{inspect.signature(execute)}")


@functools.cache
def by_position(execute: Callable[..., Any]) -> bool:
    """Whether `execute` names its arguments in a way of its own, so that their order has to do."""
    if _binds(execute, EXECUTE):
        return False
    try:
        inspect.signature(execute).bind("self", *EXECUTE)
    except TypeError:
        return False
    return True


@functools.cache
def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of this name."""
    return name in inspect.signature(function).parameters


@functools.cache
def takes_images(execute: Callable[..., Any]) -> bool:
    """Whether `execute` has a place for images."""
    parameters = inspect.signature(execute).parameters.values()
    return any(p.name == "images" or p.kind is p.VAR_KEYWORD for p in parameters)


def _binds(execute: Callable[..., Any], names: tuple[str, ...]) -> bool:
    try:
        inspect.signature(execute).bind("self", **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _check_call(function: Callable[..., Any], arguments: tuple[Any, ...], expected: str) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise CodeFileError(f"{expected}: {error}") from error
    except ValueError:  # something built in that does not say
        return
