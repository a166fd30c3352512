"""Math answers, compared as numbers where both are plain numbers, else by math-verify (extra `[math]`).

Rules: the last `\\boxed{}` wins, one value; 2 1/2 and 2\\frac{1}{2} are 5/2; x% is x/100; thousands separators, `$`,
units in `\\text{}` and trailing punctuation are dropped; what cannot be read is wrong, never an error.
No signals are used: it works in any thread, and its time is bounded by the process that calls it.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

from openrlhf.agents.graders.text import FINAL_MARK, MAX_DIGITS, strip_special

logger = logging.getLogger(__name__)
BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
ANSWER_IS = re.compile(r"(?:answer|result)\s*(?:is|:|=)\s*:?\s*(?P<value>[^\n]+)", re.IGNORECASE)
MATH_SPAN = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}|[A-Za-z]{3,}\s*[,.;]")
ANY_NUMBER = re.compile(r"[-+]?(?:\d+\s+)?\d+\s*/\s*\d+|[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?|[-+]?\.\d+%?")
DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\^\s*\{?\s*\\circ\s*\}?|\\?\$")
TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d))")
PLAIN = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s+)?(?P<top>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
    r"\s*(?:/\s*(?P<bottom>\d+))?\s*(?P<percent>\\?%)?"
)
MIXED_SHAPE = re.compile(r"[-+]?\s*\d+\s+\d+\s*/\s*\d+")
HUGE_POWER = re.compile(r"\^\s*\{?\s*\d{4,}|\^\s*\{[^{}]*\^|\*\*\s*\d{4,}|!\s*!")
MAX_EXPRESSION = 400  # characters; longer answers are wrong, and slow to simplify
CONTROL = {"\x0c": "\\f", "\x08": "\\b", "\x07": "\\a", "\x0b": "\\v"}


def grade_math(response: str, label: str, *, require_boxed: bool = False) -> bool:
    """Whether the final answer of a response equals the label.

    response: without its prompt. require_boxed: only an answer in `\\boxed{}` counts.
    """
    answer = extract_answer(response, require_boxed=require_boxed)
    if answer is None:
        return False
    boxed = last_boxed(label)
    return math_equal(answer, label if boxed is None else boxed)


def extract_answer(response: str, *, require_boxed: bool = False) -> str | None:
    """The final answer: the last `\\boxed{}`, else what follows `####` or "the answer is", a formula, a number."""
    text = strip_special(repair(response)).strip()
    if BOXED.search(text) or require_boxed:
        return last_boxed(text)
    marked = FINAL_MARK.findall(text)
    if marked:
        return marked[-1].strip()
    if "\n" not in text and not WORDS.search(text):
        return text or None
    stated = [m.group("value") for m in ANSWER_IS.finditer(text)]
    return _formula_or_number(stated[-1]) if stated else _formula_or_number(text)


def _formula_or_number(text: str) -> str | None:
    spans = MATH_SPAN.findall(text)
    if spans:
        return next(part for part in spans[-1] if part)
    numbers = ANY_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}` or `\\fbox{}`; None where there is none or its braces are not closed."""
    found = list(BOXED.finditer(text))
    if not found:
        return None
    start = found[-1].end()
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : i]
    return None


def math_equal(answer: str, label: str) -> bool:
    """Whether two expressions are equal. Whatever cannot be read is not equal."""
    answer, label = _clean(repair(answer)), _clean(repair(label))
    if not answer or not label or max(len(answer), len(label)) > MAX_EXPRESSION:
        return False
    if answer == label:
        return True
    a, b = parse_number(answer), parse_number(label)
    if a is not None and b is not None:
        return a == b
    if any(MIXED_SHAPE.search(text) or HUGE_POWER.search(text) for text in (answer, label)):
        return False
    return _symbolic_equal(answer, label)


def parse_number(text: str) -> Fraction | None:
    """The exact value of a plain number: integer, decimal, fraction, mixed number or percentage; else None."""
    text = FRACTION.sub(_plain_fraction, _clean(text)).strip()
    match = PLAIN.fullmatch(text)
    if match is None or len(text) > MAX_DIGITS:
        return None
    top = Fraction(match["top"].replace(",", "").rstrip(".") or "0")
    if match["bottom"]:
        if int(match["bottom"]) == 0:
            return None
        top /= int(match["bottom"])
    if match["whole"]:
        if not match["bottom"] or top >= 1 or top.denominator == 1:
            return None  # "4 10/3" and "1 234" are no mixed numbers
        top += int(match["whole"])
    if match["percent"]:
        top /= 100
    return -top if match["sign"] == "-" else top


def _plain_fraction(match: re.Match[str]) -> str:
    top, bottom = match[1] or match[2], match[3] or match[4]
    before = match.string[: match.start()].rstrip()
    return f" {top}/{bottom}" if before[-1:].isdigit() else f"{top}/{bottom}"


def _clean(text: str) -> str:
    # Text behind something is a unit; text that comes first is the answer itself.
    text = TEXT.sub(lambda m: "" if m.string[: m.start()].strip() else m[1], text)
    text = DROPPED.sub("", text).replace("{,}", ",").replace("−", "-").strip()
    return text.rstrip(".,;:! ").strip()


def repair(text: str) -> str:
    """Puts back backslashes that wrong escaping turned into control characters (`\\f` of `\\frac`), with a warning."""
    for character, escape in CONTROL.items():
        if character in text:
            logger.warning("a math answer holds the control character %r; read as %r", character, escape)
            text = text.replace(character, escape)
    return text


def _symbolic_equal(answer: str, label: str) -> bool:
    math_verify = _library()
    # No time-out of its own: that would need SIGALRM, which works in a main thread only.
    gold = math_verify.parse(f"${label}$", parsing_timeout=None)
    target = math_verify.parse(f"${answer}$", parsing_timeout=None)
    if not gold or not target:
        return False
    return bool(math_verify.verify(gold, target, timeout_seconds=None))


def _library() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ImportError("math-verify is not installed: pip install 'openrlhf-agents[math]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every call without a time-out
    return math_verify
