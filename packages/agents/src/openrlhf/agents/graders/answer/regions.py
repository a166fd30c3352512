"""Sets of real numbers: intervals, their unions, what inequalities in one symbol describe, lines without points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from openrlhf.agents.graders.answer.equality import close, equal, infinity, symbols
from openrlhf.agents.graders.answer.reader import Node, number
from openrlhf.agents.graders.answer.shapes import Combination, Group, Leaf, Range, Relation, Shape
from openrlhf.agents.graders.answer.tokens import UnreadableError
from openrlhf.agents.graders.answer.values import DIGITS, Evaluator, OutsideError

MINUS, PLUS = Node("neg", (Node("infty"),)), Node("infty")
MAX_PIECES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """One interval; a point where both ends are equal."""

    low: Node
    high: Node
    closed: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Region:
    """Pieces in order that do not touch. name: of the symbol that lies in it, where the answer has one."""

    name: str
    pieces: tuple[Piece, ...]


def region_of(shape: Shape) -> Region | None:
    """The set of numbers that an answer describes; None where it describes none."""
    try:
        return _region(shape)
    except OutsideError:
        return None


def equal_regions(a: Region, b: Region) -> bool:
    if (a.name and b.name and a.name != b.name) or len(a.pieces) != len(b.pieces):
        return False
    return all(
        p.closed == q.closed and equal(p.low, q.low) and equal(p.high, q.high)
        for p, q in zip(a.pieces, b.pieces, strict=True)
    )


def _region(shape: Shape) -> Region | None:
    if isinstance(shape, Range):
        return _interval(shape.low, shape.high, shape.closed)
    if isinstance(shape, Group):
        return _group(shape)
    if isinstance(shape, Relation):
        return _relation(shape)
    if isinstance(shape, Combination):
        regions = [_region(item) for item in shape.items]
        known = [r for r in regions if r is not None]
        if len(known) < len(regions):
            return None
        if shape.kind == "union":
            return _union(known)
        return None if len(known) != 2 else _without(*known)
    return None


def _interval(low: Shape, high: Shape, closed: tuple[bool, bool]) -> Region | None:
    if not (isinstance(low, Leaf) and isinstance(high, Leaf)) or low.node is None or high.node is None:
        return None
    if symbols(low.node) | symbols(high.node):
        return None
    piece = Piece(low.node, high.node, closed)
    order = compare(piece.low, piece.high)
    return Region("", (piece,)) if order < 0 or (order == 0 and all(closed)) else None


def _group(shape: Group) -> Region | None:
    if shape.kind == "tuple" and len(shape.items) == 2:
        return _interval(shape.items[0], shape.items[1], (False, False))
    if shape.kind == "set":
        points = [_interval(item, item, (True, True)) for item in shape.items]
        return None if None in points else _union([p for p in points if p is not None])
    if shape.kind == "list" and shape.joiner != ",":
        regions = [_region(item) for item in shape.items]
        known = [r for r in regions if r is not None]
        if len(known) < len(regions):
            return None
        return _union(known) if shape.joiner == "\\or" else _intersection(known)
    return None


def _relation(shape: Relation) -> Region | None:
    """The solutions of linear inequalities in one symbol."""
    parts = []
    for left, sign, right in zip(shape.sides, shape.signs, shape.sides[1:], strict=False):
        if not (isinstance(left, Leaf) and isinstance(right, Leaf)) or left.node is None or right.node is None:
            return None
        part = None if sign == "=" else _half_line(left.node, sign, right.node)
        if part is None:
            return None
        parts.append(part)
    return _intersection(parts)


def _half_line(left: Node, sign: str, right: Node) -> Region | None:
    names = symbols(left) | symbols(right)
    if len(names) != 1 or infinity(left) or infinity(right):
        return None
    (name,) = names
    difference = Node("add", (left, Node("neg", (right,))))
    at = [substitute(difference, name, number(i)) for i in (0, 1, 3, -2)]
    slope = Node("add", (at[1], Node("neg", (at[0],))))
    linear = all(equal(Node("add", (at[0], Node("mul", (number(i), slope)))), v) for i, v in ((3, at[2]), (-2, at[3])))
    direction = compare(slope, number(0))
    if not linear or direction == 0:
        return None
    root = right if left.op == "symbol" else left if right.op == "symbol" else None
    root = root if root is not None else Node("neg", (Node("div", (at[0], slope)),))
    if sign == "\\ne":
        return Region(name, (Piece(MINUS, root, (False, False)), Piece(root, PLUS, (False, False))))
    closed = sign in ("\\le", "\\ge")
    above = (sign in (">", "\\ge")) == (direction > 0)
    piece = Piece(root, PLUS, (closed, False)) if above else Piece(MINUS, root, (False, closed))
    return Region(name, (piece,))


def substitute(node: Node, name: str, value: Node) -> Node:
    if node.op == "symbol" and node.name == name:
        return value
    return replace(node, args=tuple(substitute(arg, name, value) for arg in node.args)) if node.args else node


def compare(a: Node, b: Node) -> int:
    """-1, 0 or 1 as a lies below b, is b or lies above. Raises OutsideError where they are no real numbers."""
    if infinity(a) or infinity(b):
        return (infinity(a) > infinity(b)) - (infinity(a) < infinity(b))
    evaluator = Evaluator({}, digits=DIGITS, complex=False)
    x, y = evaluator.value(a), evaluator.value(b)
    if close(x, y, evaluator.scale, decimal=False):
        return 0
    x, y = evaluator.number(x), evaluator.number(y)
    return -1 if x < y else 1


def _name(regions: list[Region]) -> str:
    names = {r.name for r in regions if r.name}
    if len(names) > 1:
        raise UnreadableError("inequalities in several symbols")
    return names.pop() if names else ""


def _union(regions: list[Region]) -> Region:
    pieces = [p for r in regions for p in r.pieces]
    if len(pieces) > MAX_PIECES:
        raise UnreadableError("too many intervals")
    merged: list[Piece] = []
    for piece in _sorted(pieces):
        if merged and _touches(merged[-1], piece):
            merged[-1] = _joined(merged[-1], piece)
        else:
            merged.append(piece)
    return Region(_name(regions), tuple(merged))


def _sorted(pieces: list[Piece]) -> list[Piece]:
    result: list[Piece] = []
    for piece in pieces:  # insertion by our own order; there are few
        at = 0
        while at < len(result) and _starts(result[at], piece) <= 0:
            at += 1
        result.insert(at, piece)
    return result


def _starts(a: Piece, b: Piece) -> int:
    order = compare(a.low, b.low)
    return order if order else int(b.closed[0]) - int(a.closed[0])


def _touches(a: Piece, b: Piece) -> bool:
    order = compare(a.high, b.low)
    return order > 0 or (order == 0 and (a.closed[1] or b.closed[0]))


def _joined(a: Piece, b: Piece) -> Piece:
    order = compare(a.high, b.high)
    high, closed = (b.high, b.closed[1]) if order < 0 else (a.high, a.closed[1])
    return Piece(a.low, high, (a.closed[0], closed or (order == 0 and b.closed[1])))


def _intersection(regions: list[Region]) -> Region | None:
    result = list(regions[0].pieces)
    for region in regions[1:]:
        result = [c for p in result for q in region.pieces if (c := _common(p, q)) is not None]
    return Region(_name(regions), tuple(result)) if result else None


def _common(a: Piece, b: Piece) -> Piece | None:
    lower, upper = compare(a.low, b.low), compare(a.high, b.high)
    low, low_closed = (b.low, b.closed[0]) if lower < 0 else (a.low, a.closed[0])
    high, high_closed = (a.high, a.closed[1]) if upper < 0 else (b.high, b.closed[1])
    if lower == 0:
        low_closed = a.closed[0] and b.closed[0]
    if upper == 0:
        high_closed = a.closed[1] and b.closed[1]
    order = compare(low, high)
    if order > 0 or (order == 0 and not (low_closed and high_closed)):
        return None
    return Piece(low, high, (low_closed, high_closed))


def _without(line: Region, points: Region) -> Region | None:
    pieces: Any = line
    for point in points.pieces:
        if compare(point.low, point.high) != 0:
            return None
        holes = Region("", (Piece(MINUS, point.low, (False, False)), Piece(point.low, PLUS, (False, False))))
        pieces = _intersection([pieces, holes])
        if pieces is None:
            return None
    return pieces
