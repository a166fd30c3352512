"""Values of flags, for tests that try every flag."""

from __future__ import annotations

from typing import Any

from openrlhf.launcher.flags import Flag


def another(flag: Flag) -> Any:
    """A value that the flag does not have by default."""
    if flag.shape.base is bool:
        return not flag.default
    if flag.shape.choices:
        return next(choice for choice in flag.shape.choices if choice != flag.default)
    one = {int: 7, float: 7.0, str: "another"}[flag.shape.base]
    return one if flag.shape.count == 1 else (one,) * 2
