"""Text answers: exact match, numbers, and what counts as the answer in a response."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>|</?s>|<(?:bos|eos|pad|end_of_turn)>")
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
FINAL_MARK = re.compile(r"####\s*([^\n]*)")
HEAD = 16  # characters that are compared before a whole end of the prompt is
MAX_DIGITS = 400  # longer digit strings are no answers, and slow to compare


def exact(answer: str, label: str, *, ignore_case: bool = True) -> bool:
    """Equal after trimming, collapsing white space and Unicode normalisation."""
    return _plain(answer, ignore_case) == _plain(label, ignore_case)


def _plain(text: str, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFKC", strip_special(text)).split())
    return text.casefold() if ignore_case else text


def strip_special(text: str) -> str:
    """Without special tokens such as `<|im_end|>` and `</s>`."""
    return SPECIAL_TOKEN.sub("", text)


def response_of(query: str, prompt: str) -> str:
    """The response part of a full text, also where the prompt was cut from the left before generation.

    Raises ValueError where no end of the prompt is found in front: then nothing may be graded, for the prompt itself
    may hold an answer.
    """
    if query.startswith(prompt):
        return query[len(prompt) :]
    head = query[:HEAD]
    for start in range(1, len(prompt)):
        may_fit = prompt.startswith(head, start) or len(prompt) - start < HEAD
        if may_fit and query.startswith(prompt[start:]):
            return query[len(prompt) - start :]
    raise ValueError(f"the query does not start with the prompt or an end of it: {query[:80]!r} / {prompt[-80:]!r}")


def numeric(answer: str, label: str, *, tolerance: float = 0.0) -> bool:
    """The last number of each text is equal, or within `tolerance` (absolute). -3 is not 3; 1,000 is 1000."""
    a, b = last_number(answer), last_number(label)
    if a is None or b is None:
        return False
    return a == b or abs(a - b) <= Fraction(tolerance)


def last_number(text: str) -> Fraction | None:
    """The number after the last `####`, else the last number of the text."""
    text = strip_special(text)
    marked = FINAL_MARK.findall(text)
    numbers = NUMBER.findall(marked[-1] if marked else text)
    if not numbers or len(numbers[-1]) > MAX_DIGITS:
        return None
    return Fraction(numbers[-1].replace(",", ""))
