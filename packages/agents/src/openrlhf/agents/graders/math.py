"""Math answers, compared by what they are: numbers, lists, sets, tuples, intervals, matrices, relations, words.

Rules: the last `\\boxed{}` wins, one value; 2 1/2 and 2\\frac{1}{2} are 5/2; x% is x/100; thousands separators, money
signs, units with their exponents and closing punctuation are dropped; what cannot be read is wrong, never an error.
Exact answers are compared exactly, decimals to a relative 1e-6. The order of the arguments does not matter. Sums,
integrals and limits go to math-verify (extra `[math]`), in a process that is killed at its limit; all else is computed
here, with a bound on every step, so it works in any thread.
"""

from __future__ import annotations

import logging
import re

from openrlhf.agents.graders.answer.compare import same
from openrlhf.agents.graders.answer.shapes import shape_of
from openrlhf.agents.graders.answer.tidy import Tidy, tidy
from openrlhf.agents.graders.answer.tokens import TooLargeError, UnreadableError
from openrlhf.agents.graders.answer.values import OutsideError, start_count
from openrlhf.agents.graders.text import FINAL_MARK, strip_special

logger = logging.getLogger(__name__)
BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
ANSWER_IS = re.compile(r"(?:answer|result)\s*+(?:is|:|=)[ \t]*+:?[ \t]*+(?P<value>[^\n]+)", re.IGNORECASE)
DELIMITER = re.compile(r"\$\$|\$|\\\(|\\\)|\\\[|\\\]")
WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}+(?:\s++[A-Za-z]{2,}|(?<=[A-Za-z]{3})\s*+[,.;])")
ANY_NUMBER = re.compile(
    r"(?<![\d.])(?:[-+]?(?:\d++\s++)?\d++\s*+/\s*+\d++|[-+]?(?:\d{1,3}(?:,\d{3})+|\d++)(?:\.\d++)?%?|[-+]?\.\d++%?)"
)
WRAPPED = r"(?:\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{\s*)?"
CHOICE = re.compile(
    rf"{WRAPPED}\(?\s*{WRAPPED}(?P<letter>[A-Z])\s*\}}?\s*\)?\s*\}}?\s*[.:]?"
    r"|\\text(?:bf)?\s*\{\s*\((?P<named>[A-J])\)\s*\}(?:\\ |[\s~:.])*(?P<content>\S.*)"
)
MAX_EXPRESSION = 2000  # characters; longer answers are right only if they are the label letter by letter
LAST_PART = 20_000  # characters of a response in which an answer without a box is looked for
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
    text = text[-LAST_PART:]
    marked = FINAL_MARK.findall(text)
    if marked:
        return marked[-1].strip()
    if "\n" not in text and not WORDS.search(text):
        return text or None
    stated = [m.group("value") for m in ANSWER_IS.finditer(text)]
    return _formula_or_number(stated[-1]) if stated else _formula_or_number(text)


def _formula_or_number(text: str) -> str | None:
    span = _last_formula(text)
    if span:
        return span
    numbers = ANY_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def _last_formula(text: str) -> str | None:
    """The last formula between dollar signs, `\\( \\)` or `\\[ \\]`, found in one pass."""
    closing = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
    found, opened, start = None, "", 0
    for match in DELIMITER.finditer(text):
        sign = match[0]
        if opened and sign == closing[opened]:
            content = text[start : match.start()]
            found = content if content.strip() and (opened != "$" or "\n" not in content) else found
            opened = ""
        elif sign in closing and (not opened or opened == "$"):
            opened, start = sign, match.end()
    return found


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
    """Whether two answers are equal. Whatever cannot be read, or costs too much to compare, is not equal."""
    answer, label = (_unboxed(repair(text).strip().strip("$")) for text in (answer, label))
    if answer == label:
        return bool(answer.strip("$ ."))
    if max(len(answer), len(label)) > MAX_EXPRESSION:
        return False
    choices = [CHOICE.fullmatch(text) for text in (answer, label)]
    if choices[0] is not None and choices[1] is not None:
        letters = [choice["letter"] or choice["named"] for choice in choices if choice is not None]
        return letters[0] == letters[1]
    answer, label = (
        text if choice is None else choice["content"] or text
        for text, choice in zip((answer, label), choices, strict=True)
    )
    a, b = tidy(answer), tidy(label)
    if not a.text or not b.text or (a.units and b.units and sorted(a.units) != sorted(b.units)):
        return False
    return a.text == b.text or _same(a, b)


def _unboxed(text: str) -> str:
    content = last_boxed(text) if BOXED.match(text) else None
    return (text if content is None else content).strip()


def _same(a: Tidy, b: Tidy) -> bool:
    start_count()
    try:
        return same(*sorted((shape_of(a.text), shape_of(b.text)), key=repr))
    except (TooLargeError, UnreadableError, OutsideError, RecursionError):  # the last: deep in the caller's own stack
        return False


def repair(text: str) -> str:
    """Puts back backslashes that wrong escaping turned into control characters (`\\f` of `\\frac`), with a warning."""
    for character, escape in CONTROL.items():
        if character in text:
            logger.warning("a math answer holds the control character %r; read as %r", character, escape)
            text = text.replace(character, escape)
    return text
