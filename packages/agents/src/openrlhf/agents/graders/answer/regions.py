"""Sets of real numbers: intervals, their unions, what inequalities in one symbol describe, lines without points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cmp_to_key
from typing import Any

from openrlhf.agents.graders.answer.equality import close, equal, infinity, symbols
from openrlhf.agents.graders.answer.reader import Node, number
from openrlhf.agents.graders.answer.shapes import Combination, Group, Leaf, Range, Relation, Shape
from openrlhf.agents.graders.answer.tokens import UnreadableError
from openrlhf.agents.graders.answer.values import DIGITS, Evaluator, OutsideError

MAX_PIECES = 64


@dataclass(frozen=True, slots=True)
class End:
    """Where an interval begins or ends: at a number, or just above (side 1) or just below it (side -1): an open end."""

    at: Node
    side: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One interval; a point where both ends are equal."""

    low: End
    high: End


@dataclass(frozen=True, slots=True)
class Region:
    """Pieces in order that do not touch. name: of the symbol that lies in it, where the answer has one."""

    name: str
    pieces: tuple[Piece, ...]


MINUS, PLUS = End(Node("neg", (Node("infty"),)), 1), End(Node("infty"), -1)


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
        x.side == y.side and equal(x.at, y.at)
        for p, q in zip(a.pieces, b.pieces, strict=True)
        for x, y in ((p.low, q.low), (p.high, q.high))
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
    piece = Piece(End(low.node, 0 if closed[0] else 1), End(high.node, 0 if closed[1] else -1))
    return Region("", (piece,)) if order(piece.low, piece.high) <= 0 else None


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
        return _all_but(name, root)
    side = 0 if sign in ("\\le", "\\ge") else 1
    above = (sign in (">", "\\ge")) == (direction > 0)
    return Region(name, (Piece(End(root, side), PLUS) if above else Piece(MINUS, End(root, -side)),))


def _all_but(name: str, point: Node) -> Region:
    return Region(name, (Piece(MINUS, End(point, -1)), Piece(End(point, 1), PLUS)))


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


def order(a: End, b: End) -> int:
    """-1, 0 or 1 as an end lies below another one, is it or lies above."""
    return compare(a.at, b.at) or (a.side > b.side) - (a.side < b.side)


BY_ORDER = cmp_to_key(order)


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
    for piece in sorted(pieces, key=lambda p: BY_ORDER(p.low)):
        if merged and _touches(merged[-1].high, piece.low):
            merged[-1] = Piece(merged[-1].low, max(merged[-1].high, piece.high, key=BY_ORDER))
        else:
            merged.append(piece)
    return Region(_name(regions), tuple(merged))


def _touches(high: End, low: End) -> bool:
    """Whether no number lies between two pieces: at the same number, one of the ends has to be closed."""
    gap = compare(high.at, low.at)
    return gap > 0 or (gap == 0 and low.side - high.side < 2)


def _intersection(regions: list[Region]) -> Region | None:
    result = list(regions[0].pieces)
    for region in regions[1:]:
        result = [c for p in result for q in region.pieces if (c := _common(p, q)) is not None]
    return Region(_name(regions), tuple(result)) if result else None


def _common(a: Piece, b: Piece) -> Piece | None:
    piece = Piece(max(a.low, b.low, key=BY_ORDER), min(a.high, b.high, key=BY_ORDER))
    return piece if order(piece.low, piece.high) <= 0 else None


def _without(line: Region, points: Region) -> Region | None:
    pieces: Any = line
    for point in points.pieces:
        if order(point.low, point.high) != 0:
            return None
        pieces = _intersection([pieces, _all_but("", point.low.at)])
        if pieces is None:
            return None
    return pieces
