"""What an answer is: an expression, a list, a set, a tuple or interval, a union, a matrix, a relation, a ratio, words.

Bare lists and sets have no order, tuples and matrices have one. `(1,2)` may be a point or an open interval: that is
decided by what it is compared with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from openrlhf.agents.graders.answer.reader import LIBRARY, Node, read
from openrlhf.agents.graders.answer.tokens import Token, UnreadableError, closes_at_end, matrix_rows, split, tokenize

RELATIONS = {"=", "<", ">", "\\le", "\\ge", "\\ne"}
MAX_MEMBERS = 64
NOT_WORDS = {"infinity", "inf", "pi"}
PRODUCTS_SPAN = 3  # letters this near in the alphabet (abc, xyz) are a product, not a word
SHORT_WORDS = {"no", "on", "in", "at", "by", "am", "pm", "hi", "ok", "be", "fed", "def"}
FUNCTION_START = re.compile(r"(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|arc|max|min|gcd|lcm)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One expression. node None: it is left to math-verify (a sum, an integral). source: its LaTeX."""

    node: Node | None
    source: str


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, in lower case, without punctuation; members: where commas divide them."""

    text: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """kind: list (joined by `,`, and, or), set, tuple. joiner: of a list."""

    kind: str
    items: tuple[Shape, ...]
    joiner: str = ","


@dataclass(frozen=True, slots=True)
class Range:
    """An interval with at least one square bracket, or all real numbers."""

    low: Leaf
    high: Leaf
    closed: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Combination:
    """kind: union, difference."""

    kind: str
    items: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells; kind matrix, or cases, whose rows have no order."""

    kind: str
    rows: tuple[tuple[Shape, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain: one sign fewer than sides. name: what the left side names where it can be an assignment, else ""."""

    signs: tuple[str, ...]
    sides: tuple[Shape, ...]
    name: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """Parts between colons: a ratio or a time of day, with the words behind it (am, pm)."""

    parts: tuple[Shape, ...]
    words: tuple[str, ...]


Shape: TypeAlias = Leaf | Words | Group | Range | Combination | Matrix | Relation | Ratio


def shape_of(text: str) -> Shape:
    """The shape of a tidy answer. Raises UnreadableError."""
    words = words_of(text)
    return words if words is not None else _Shaper(text).shape(tokenize(text))


def words_of(text: str) -> Words | None:
    """The answer as words, where it has no mathematics in it but numbers."""
    bare = re.sub(r"\\word\{([^{}]*)\}", r"\1", text)
    if not re.fullmatch(r"[A-Za-z0-9\s.,;:'&/-]*", bare):
        return None
    found = [w for w in re.findall(r"[A-Za-z]+", bare) if w.lower() not in ("and", "or")]
    marked = "\\word{" in text and not re.search(r"\d", bare)
    if not marked and not any(_is_word(w) for w in found):
        return None
    if re.search(r"\d", bare) and re.search(r"\d\s*[-:/]|,\d|[A-Za-z]\d", bare):
        return None
    parts = tuple(sorted(_plain(p) for p in re.split(r"[,;]| and ", bare) if _plain(p)))
    return Words(_plain(bare), parts)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", re.sub(r"[.']", "", text.lower())))


def _is_word(letters: str) -> bool:
    low = letters.lower()
    if low in SHORT_WORDS:
        return True
    if len(low) < 3 or low in NOT_WORDS or FUNCTION_START.match(low):
        return False
    return max(map(ord, low)) - min(map(ord, low)) > PRODUCTS_SPAN


class _Shaper:
    def __init__(self, text: str) -> None:
        self.text = text

    def shape(self, tokens: list[Token]) -> Shape:
        """Lists first, since commas and connectives bind least; then relations, unions, ratios, brackets."""
        parts, separators = split(tokens, {",", ";", "\\and", "\\or"})
        parts = [part for part in parts if part]
        if not parts:
            raise UnreadableError("empty")
        if len(parts) == 1:
            return self.member(parts[0])
        if len(parts) > MAX_MEMBERS:
            raise UnreadableError("too many members")
        joiner = next((s for s in ("\\or", "\\and") if s in separators), ",")
        items: list[Shape] = []
        for part in parts:
            shape = self.member(part)
            items.extend(shape.items if isinstance(shape, Group) and shape.joiner == "pm" else [shape])
        return Group("list", tuple(items), joiner)

    def member(self, tokens: list[Token]) -> Shape:
        if any(t.text in ("\\pm", "\\mp") for t in tokens):
            return Group("list", tuple(self.member(_signed(tokens, plus)) for plus in (True, False)), "pm")
        sides, signs = split(tokens, RELATIONS)
        if signs:
            return self.relation(sides, signs)
        sides, found = split(tokens, {"\\in"})
        if len(found) == 1:
            return self.shape(sides[1])
        for sign, kind in (("\\cup", "union"), ("\\setminus", "difference")):
            items, found = split(tokens, {sign})
            if found:
                return Combination(kind, tuple(self.member(item) for item in items))
        parts, found = split(tokens, {":"})
        if found:
            words = tuple(t.text for t in parts[-1] if t.kind == "word")
            parts[-1] = [t for t in parts[-1] if t.kind != "word"]
            return Ratio(tuple(self.leaf(part) for part in parts), words)
        return self.bracket(tokens)

    def relation(self, sides: list[list[Token]], signs: list[str]) -> Shape:
        if not all(sides):
            raise UnreadableError("a relation without a side")
        shapes = tuple(self.member(side) for side in sides)
        name = _named(sides[0])
        name = name or _named(sides[-1]) if set(signs) == {"="} and len(sides) == 2 else name
        if name and not _named(sides[0]):
            shapes = shapes[::-1]
        return Relation(tuple(signs), shapes, name)

    def bracket(self, tokens: list[Token]) -> Shape:
        if not tokens:
            raise UnreadableError("empty")
        first, last = tokens[0], tokens[-1]
        if len(tokens) == 1 and first.text == "\\varnothing":
            return Group("set", ())
        if len(tokens) == 1 and first.text in ("mathbb", "\\mathbbR"):
            return Range(_infinite(-1), _infinite(1), (False, False))
        environment = self.environment(tokens)
        if environment is not None:
            return environment
        if first.kind != "begin" and closes_at_end(tokens):
            enclosed = self.enclosed(first.text, last.text, tokens[1:-1])
            if enclosed is not None:
                return enclosed
        return self.leaf(tokens)

    def enclosed(self, opening: str, closing: str, inner: list[Token]) -> Shape | None:
        """What stands in brackets: a set, a tuple, an interval, or None for one expression."""
        parts = split(inner, {",", ";"})[0] if inner else []
        if opening == "\\{" or (opening == "{" and len(parts) > 1):
            return self.set(inner, parts)
        if len(parts) > 1:
            if len(parts) > MAX_MEMBERS or not all(parts):
                raise UnreadableError("members")
            if len(parts) == 2 and {"[", "]"} & {opening, closing}:
                low, high = (self.leaf(part) for part in parts)
                return Range(low, high, (opening == "[", closing == "]"))
            return Group("tuple", tuple(self.member(part) for part in parts))
        shape = self.shape(inner) if inner else None
        if shape is None:
            raise UnreadableError("empty brackets")
        return None if isinstance(shape, Leaf | Words) and opening != "{" else shape

    def set(self, inner: list[Token], parts: list[list[Token]]) -> Shape:
        condition = [split(inner, {sign})[0] for sign in ("|", ":")] if inner else []
        for sides in condition:
            if len(sides) == 2 and sides[0] and sides[0][0].kind == "letter":
                return self.shape(sides[1])
        if len(parts) > MAX_MEMBERS:
            raise UnreadableError("too many members")
        shape = self.shape(inner) if inner else Group("set", ())
        items = shape.items if isinstance(shape, Group) and shape.kind == "list" else (shape,)
        return Group("set", items if inner else ())

    def environment(self, tokens: list[Token]) -> Shape | None:
        """A matrix, with a factor before it and a transposition behind it, or cases."""
        start = next((i for i, t in enumerate(tokens) if t.kind == "begin"), None)
        if start is None or tokens[start].text == "vmatrix":
            return None
        body, transposed = tokens[start:], False
        tail = "".join(t.text for t in body[-4:])
        for ending in ("^T", "^{T}", "^\\top"):
            if tail.endswith(ending):
                body, transposed = body[: -2 if ending != "^{T}" else -4], True
        if not closes_at_end(body):
            return None
        rows = matrix_rows(body)
        if not rows or sum(map(len, rows)) > MAX_MEMBERS:
            raise UnreadableError("matrix")
        if tokens[start].text in ("cases", "dcases", "aligned", "align"):
            return Matrix("cases", tuple(tuple(self.shape(c) for c in row if c) for row in rows))
        factor = tokens[:start]
        if factor and factor[-1].text in ("\\cdot", "\\times", "*"):
            factor = factor[:-1]
        cells = [tuple(self.leaf(_times(factor, cell)) for cell in row) for row in rows]
        return Matrix("matrix", tuple(zip(*cells, strict=True)) if transposed else tuple(cells))

    def leaf(self, tokens: list[Token]) -> Leaf:
        if not tokens:
            raise UnreadableError("empty")
        source = self.text[tokens[0].start : tokens[-1].end]
        if any(t.text in LIBRARY for t in tokens):
            return Leaf(None, source)
        if tokens[-1].text == "\\infty" and len(tokens) <= 2 and tokens[0].text in ("\\infty", "+", "-"):
            return _infinite(-1 if tokens[0].text == "-" else 1)
        return Leaf(read(tokens), source)


def _infinite(sign: int) -> Leaf:
    node = Node("infty")
    return Leaf(node if sign > 0 else Node("neg", (node,)), "\\infty" if sign > 0 else "-\\infty")


def _times(factor: list[Token], cell: list[Token]) -> list[Token]:
    if not factor:
        return cell
    opening, closing = Token("operator", "(", 0, 0), Token("operator", ")", 0, 0)
    if factor == [Token("operator", "-", factor[0].start, factor[0].end)]:
        return [*factor, opening, *cell, closing]
    return [opening, *factor, closing, opening, *cell, closing]


def _signed(tokens: list[Token], plus: bool) -> list[Token]:
    signs = {"\\pm": "+" if plus else "-", "\\mp": "-" if plus else "+"}
    return [Token("operator", signs[t.text], t.start, t.end) if t.text in signs else t for t in tokens]


def _named(tokens: list[Token]) -> str:
    """The name that a side assigns to: a symbol, a function of symbols, a tuple of symbols; else ""."""
    text = "".join(t.text for t in tokens)
    if any(t.kind not in ("letter", "symbol", "operator", "number", "command") for t in tokens):
        return ""
    symbol = r"(?:[A-Za-z]|\\(?!frac|sqrt|pi|infty|word)[A-Za-z]+)(?:_(?:\{[^{}]*\}|\w))?'*(?:\^\{?-1\}?)?"
    several = rf"{symbol}(?:,{symbol})*"
    pattern = rf"{symbol}|{symbol}\({several}\)|\({several}\)"
    return text if re.fullmatch(pattern, text) and text not in ("e", "i") else ""
