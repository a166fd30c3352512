"""Warnings that are said once per process, however many samples meet their cause."""

from __future__ import annotations

import logging
from typing import Any

_said: set[str] = set()


def warn_once(logger: logging.Logger, about: str, message: str, *values: Any) -> None:
    """Logs `message % values` unless something was said about `about` before."""
    if about not in _said:
        _said.add(about)
        logger.warning(message, *values)


def forget() -> None:
    """Says everything again (for tests)."""
    _said.clear()
