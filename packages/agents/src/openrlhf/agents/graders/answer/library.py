"""Asks math-verify (extra `[math]`) about sums, products, integrals, limits, with a limit: see `graders.limited`."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec

from openrlhf.agents.graders.limited import Helper

SECONDS = 1.5  # for one question
LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


@lru_cache(maxsize=4096)
def library_equal(a: str, b: str) -> bool:
    """Whether math-verify finds two LaTeX expressions equal within the limit; their order does not matter."""
    letters = {letter for letter in LETTER.findall(f"{a} {b}") if len(letter) == 1}
    if len({letter.lower() for letter in letters}) < len(letters):
        return False  # it reads all letters as lower case
    if find_spec("math_verify") is None:
        raise ImportError("math-verify is not installed: pip install 'openrlhf-agents[math]'")
    first, second = sorted((a, b))
    return _helper.ask({"a": first, "b": second}, SECONDS) or False


_helper = Helper("math")
