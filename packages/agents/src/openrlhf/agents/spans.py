"""Spans: where the time of a group goes, for whoever traces. Nobody does by default, and then a span costs nothing.

A group holds its samples, a sample its turns, a turn the request to the engine; the reward of the group stands beside
the samples. What is opened inside a span, also in tasks that start there, is its child: that is the tracer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Tracer = Callable[[str, Mapping[str, str | int]], AbstractContextManager[Any]]
"""(name, attributes) -> what surrounds the span."""

_tracer: Tracer | None = None


def use_tracer(tracer: Tracer | None) -> None:
    """From now on this process' spans go there; None: nowhere."""
    global _tracer
    _tracer = tracer


def is_traced() -> bool:
    """Whether somebody traces this process."""
    return _tracer is not None


def span(name: str, **attributes: str | int) -> AbstractContextManager[Any]:
    """Surrounds a piece of work."""
    return nullcontext() if _tracer is None else _tracer(name, attributes)
