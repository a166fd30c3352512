"""Cuts the uniform spelling of an answer into tokens, and finds what belongs together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from openrlhf.agents.graders.answer.tidy import ROW

NAMES = [
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "ln",
    "log", "exp", "pi",
]  # fmt: skip
TOKEN = re.compile(
    r"(?P<repeating>\d*\.\d*\\overline\s*\{\s*\d+\s*\})"
    r"|(?P<based>\d+_\s*(?:\{\s*\d+\s*\}|\d+)|\d[0-9A-F]+_\s*(?:\{\s*1[1-6]\s*\}|1[1-6]))"
    r"|(?P<scientific>(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d+(?![\d.A-Za-z]))"
    r"|(?P<thousands>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d.]|,\d))"
    r"|(?P<spaced>\d{1,3}(?: \d{3})+(?![\d.]| \d|/| /|\\))"
    r"|(?P<number>\d+(?:\.\d+)?(?!\d)|\.\d+|\d+)"
    r"|(?P<environment>\\(?:begin|end)\s*\{[a-z*]+\})"
    r"|(?P<word>\\word\{[^{}]*\})"
    r"|(?P<decorated>\\(?:overline|vec|hat|bar|tilde|mathbb|mathcal|overrightarrow|widehat|dot)\s*"
    r"(?:\{[^{}]*\}|[A-Za-z]))"
    r"|(?P<command>\\[A-Za-z]+|\\[{}|])"
    rf"|(?P<name>(?:{'|'.join(NAMES)})(?![a-z]))"
    r"|(?P<infinity>infinity|inf(?![a-z]))"
    r"|(?P<connective>(?<![A-Za-z])(?:and|or)(?![A-Za-z]))"
    r"|(?P<letter>[A-Za-z])"
    r"|(?P<power>\*\*)"
    rf"|(?P<operator>(?:<=|>=|!=|!!)|[-+*/^_=<>!%'|,;:&(){{}}\[\]{ROW}])"
)
OPEN, CLOSE = {"(", "[", "{", "\\{", "\\langle", "begin"}, {")", "]", "}", "\\}", "\\rangle", "end"}
MAX_EXPONENT = 5000  # of ten, in scientific notation
MAX_DEPTH = 60


# Why an answer cannot be compared: inside the grader only, outside it such an answer is wrong.
class UnreadableError(Exception):
    """The text is no answer that we can read."""


class TooLargeError(Exception):
    """The answer can be read, but its value costs more than an answer may cost."""


@dataclass(frozen=True, slots=True)
class Token:
    """text: the spelling (`\\frac`, `x`, `12`). kind: number, symbol, letter, word, command, operator, begin, end.

    value: of a number; decimals: digits behind its point, None without one; start and end: its place in the text.
    """

    kind: str
    text: str
    start: int
    end: int
    value: Fraction | None = None
    decimals: int | None = None


SIMPLE = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne", "**": "^"}


def tokenize(text: str) -> list[Token]:
    """The tokens of an answer. Raises UnreadableError at a character that has no place in one."""
    tokens: list[Token] = []
    separate = _commas_separate(text)
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        match = TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise UnreadableError(text[position])
        if match.lastgroup in ("thousands", "spaced") and separate[position]:
            match = re.compile(r"(?P<number>\d+)").match(text, position)
            assert match is not None
        tokens.append(_token(match))
        position = match.end()
    return tokens


def _commas_separate(text: str) -> list[bool]:
    """For each character, whether a comma between digits there separates members: in brackets with no `, ` in them."""
    result = [False] * len(text)
    stack: list[int] = []
    for i, character in enumerate(text):
        if character in "([{":
            stack.append(i)
        elif character in ")]}" and stack:
            start = stack.pop()
            brackets = text[start] != "{" or text[start - 1 : start] == "\\"  # not those of a LaTeX group
            if not stack and brackets and not re.search(r",\s", text[start:i]):
                result[start:i] = [True] * (i - start)
    return result


def _token(match: re.Match[str]) -> Token:
    kind, text, start, end = match.lastgroup or "", match[0], match.start(), match.end()
    if kind in ("thousands", "spaced", "number", "scientific"):
        return _number(kind, text.replace(",", "").replace(" ", ""), start, end)
    if kind == "repeating":
        return Token("number", text, start, end, _repeating(text))
    if kind == "based":
        digits, base = text.split("_")
        name = f"{digits.lstrip('0') or '0'}_{re.sub(r'[^0-9]', '', base)}"
        return Token("symbol", name, start, end)
    if kind == "environment":
        opening, name = text[1:].split("{")
        return Token(opening.strip(), name.rstrip("}* "), start, end)
    if kind == "word":
        return Token("word", " ".join(text[6:-1].lower().strip(" .,;").split()), start, end)
    if kind == "decorated":
        return Token("symbol", re.sub(r"[\s{}]", "", text), start, end)
    renamed = {"name": f"\\{text}", "infinity": "\\infty", "connective": f"\\{text}"}.get(kind)
    if renamed is not None or kind == "command":
        return Token("command", renamed or text, start, end)
    if kind == "letter":
        return Token("letter", text, start, end)
    return Token("command" if text in SIMPLE and text != "**" else "operator", SIMPLE.get(text, text), start, end)


def _number(kind: str, text: str, start: int, end: int) -> Token:
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_EXPONENT:
        raise TooLargeError(text)
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0) if "." in mantissa else None
    value = Fraction(mantissa if mantissa[-1] != "." else mantissa[:-1]) * Fraction(10) ** int(exponent or 0)
    return Token("number", text, start, end, value, decimals)


def _repeating(text: str) -> Fraction:
    whole, _, rest = text.partition(".")
    fixed, _, cycle = rest.partition("\\overline")
    cycle = re.sub(r"\D", "", cycle)
    value = Fraction(int(whole or "0")) + Fraction(int(fixed or "0"), 10 ** len(fixed))
    return value + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))


def split(tokens: list[Token], separators: set[str]) -> tuple[list[list[Token]], list[str]]:
    """The parts between separators that stand in no bracket, and the separators. Raises UnreadableError."""
    parts: list[list[Token]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        depth += _step(token)
        if depth < 0 or depth > MAX_DEPTH:
            raise UnreadableError("brackets")
        if depth == 0 and token.text in separators and token.kind in ("operator", "command"):
            parts.append([])
            found.append(token.text)
        else:
            parts[-1].append(token)
    if depth:
        raise UnreadableError("brackets")
    return parts, found


def _step(token: Token) -> int:
    name = token.kind if token.kind in ("begin", "end") else token.text
    return (name in OPEN) - (name in CLOSE)


def closes_at_end(tokens: list[Token]) -> bool:
    """Whether the bracket that opens a list of tokens is closed by the last one."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += _step(token)
        if depth == 0:
            return i == len(tokens) - 1 and i > 0
    return False


def matrix_rows(tokens: list[Token]) -> list[list[list[Token]]]:
    """The cells of an environment (its `begin` and `end` included), without a last empty row."""
    inner = tokens[1:-1]
    if tokens[0].text == "array" and inner and inner[0].text == "{":
        closing = next((i for i, t in enumerate(inner) if t.text == "}"), None)
        if closing is None:
            raise UnreadableError("array")
        inner = inner[closing + 1 :]
    rows = [split(row, {"&"})[0] for row in split(inner, {ROW})[0]]
    return [row for row in rows if any(row)]
