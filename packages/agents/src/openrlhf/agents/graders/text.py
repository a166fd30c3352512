"""Text answers: exact match, numbers, and what counts as the answer in a response."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>|</?s>|<(?:bos|eos|pad|end_of_turn)>")
# A number with all that belongs to it: 1,000.5, 2e5, 2 x 10^5, 2^5, 3/4. A sign behind a digit is an operator.
NUMBER = re.compile(
    r"(?<![\d.])(?P<sign>(?<![\d)])[-+−]\s?)?(?P<mantissa>(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
    r"(?:[eE](?P<e>[-+]?\d{1,3})(?![\w.])|\s?(?:[x×*]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?(?P<ten>[-+−]?\d{1,3})\}?"
    r"|\s?(?:\^|\*\*)\s?\{?(?P<power>[-+−]?\d{1,3})\}?|\s?/\s?(?P<over>\d++)(?![\d/]))?"
)
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
    """The number after the last `####`, else the last number of the text, with its exponent or denominator."""
    text = strip_special(text)
    marked = FINAL_MARK.findall(text)
    found = list(NUMBER.finditer(marked[-1] if marked else text))
    return None if not found or len(found[-1][0]) > MAX_DIGITS else _number(found[-1])


def _number(match: re.Match[str]) -> Fraction | None:
    value = Fraction(match["mantissa"].replace(",", ""))
    exponent = match["e"] or match["ten"]
    if exponent:
        value *= Fraction(10) ** int(exponent.replace("−", "-"))
    elif match["power"]:
        power = int(match["power"].replace("−", "-"))
        if value == 0 and power < 0:
            return None
        value **= power
    elif match["over"]:
        if int(match["over"]) == 0:
            return None
        value /= int(match["over"])
    return -value if (match["sign"] or "").strip() in ("-", "−") else value
