"""Whether two shapes are the same answer: member by member, in order where order counts. Symmetric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.agents.graders.answer.equality import equal, proportional
from openrlhf.agents.graders.answer.library import library_equal
from openrlhf.agents.graders.answer.reader import Node
from openrlhf.agents.graders.answer.regions import equal_regions, region_of
from openrlhf.agents.graders.answer.shapes import (
    Combination,
    Group,
    Leaf,
    Matrix,
    Range,
    Ratio,
    Relation,
    Shape,
    Words,
)

TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}


def same(a: Shape, b: Shape) -> bool:
    """Whether two answers are equal. Raises TooLargeError, UnreadableError."""
    if isinstance(a, Leaf) and isinstance(b, Leaf):
        return _leaves(a, b)
    if isinstance(a, Words) and isinstance(b, Words):
        return a.text == b.text or (len(a.members) > 1 and a.members == b.members)
    if isinstance(a, Relation) or isinstance(b, Relation):
        return _relations(a, b)
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        return _matrices(a, b)
    if isinstance(a, Ratio) and isinstance(b, Ratio):
        return a.words == b.words and _in_order(a.parts, b.parts)
    if isinstance(a, Group) and isinstance(b, Group) and _groups(a, b):
        return True
    if isinstance(a, Matrix) or isinstance(b, Matrix):
        return _column(a, b)
    return _regions(a, b)


def _leaves(a: Leaf, b: Leaf) -> bool:
    if a.node is None or b.node is None:
        return library_equal(a.source, b.source)
    return equal(a.node, b.node)


def _groups(a: Group, b: Group) -> bool:
    if "tuple" in (a.kind, b.kind):
        return a.kind == b.kind and _in_order(a.items, b.items)
    if "set" in (a.kind, b.kind):
        return _each_found(a.items, b.items) and _each_found(b.items, a.items)
    return _in_any_order(a.items, b.items)


def _in_order(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def _each_found(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    return all(any(same(x, y) for y in b) for x in a)


def _in_any_order(a: Sequence[Shape], b: Sequence[Shape]) -> bool:
    return _paired(a, b, same)


def _paired(a: Sequence[Any], b: Sequence[Any], equal: Callable[[Any, Any], bool]) -> bool:
    """Whether the members can be paired; greedy is enough where equality is transitive."""
    if len(a) != len(b):
        return False
    left = list(b)
    for x in a:
        found = next((i for i, y in enumerate(left) if equal(x, y)), None)
        if found is None:
            return False
        del left[found]
    return True


def _matrices(a: Matrix, b: Matrix) -> bool:
    if a.kind != b.kind:
        return False
    return _paired(a.rows, b.rows, _in_order) if a.kind == "cases" else _rows(a.rows, b.rows)


def _rows(a: Sequence[Sequence[Shape]], b: Sequence[Sequence[Shape]]) -> bool:
    return len(a) == len(b) and all(map(_in_order, a, b))


def _column(a: Shape, b: Shape) -> bool:
    """A column is the tuple of its cells; cases of one cell each are a list."""
    matrix, other = (a, b) if isinstance(a, Matrix) else (b, a)
    if not isinstance(matrix, Matrix) or not isinstance(other, Group) or any(len(row) != 1 for row in matrix.rows):
        return False
    cells = [row[0] for row in matrix.rows]
    if matrix.kind == "cases":
        return other.kind == "list" and _in_any_order(cells, other.items)
    return other.kind == "tuple" and _in_order(cells, other.items)


def _regions(a: Shape, b: Shape) -> bool:
    if not all(isinstance(s, Range | Combination | Relation | Group) for s in (a, b)):
        return False
    if isinstance(a, Group) and isinstance(b, Group) and "list" not in (a.kind, b.kind):
        return False
    first, second = region_of(a), region_of(b)
    if first is not None and second is not None:
        return equal_regions(first, second)
    if isinstance(a, Range) and isinstance(b, Range):  # ends with symbols in them
        return a.closed == b.closed and _in_order((a.low, a.high), (b.low, b.high))
    if isinstance(a, Combination) and isinstance(b, Combination) and a.kind == b.kind:
        return _in_any_order(a.items, b.items) if a.kind == "union" else _in_order(a.items, b.items)
    return False


def _relations(a: Shape, b: Shape) -> bool:
    if not (isinstance(a, Relation) and isinstance(b, Relation)):
        relation, other = (a, b) if isinstance(a, Relation) else (b, a)
        assert isinstance(relation, Relation)
        if relation.name and set(relation.signs) == {"="}:  # x=3 answers what 3 answers
            return same(relation.sides[-1], other)
        return _regions(a, b)
    if a.name and a.name == b.name and {*a.signs, *b.signs} == {"="} and same(a.sides[-1], b.sides[-1]):
        return True
    if len(a.signs) == len(b.signs) == 1:
        if _equivalent(a, b):
            return True
    elif _same_chain(a, b):
        return True
    return "=" not in (*a.signs, *b.signs) and _regions(a, b)


def _same_chain(a: Relation, b: Relation) -> bool:
    """`1 < x < 2` and `2 > x > 1`, whatever their sides are."""
    if a.signs == b.signs and _in_order(a.sides, b.sides):
        return True
    return tuple(TURNED[s] for s in a.signs[::-1]) == b.signs and _in_order(a.sides[::-1], b.sides)


def _equivalent(a: Relation, b: Relation) -> bool:
    """One relation each: the same sides, or left minus right a multiple of the other's."""
    (sign,), (other,) = a.signs, b.signs
    turned = TURNED[sign] == other
    if sign == other and _in_order(a.sides, b.sides):
        return True
    if turned and _in_order(a.sides, b.sides[::-1]):
        return True
    left, right = _difference(a), _difference(b)
    if left is None or right is None or not (sign == other or turned):
        return False
    if sign in ("=", "\\ne"):
        return proportional(left, right, positive=False)
    if sign != other:
        right = Node("neg", (right,))
    return proportional(left, right, positive=True)


def _difference(relation: Relation) -> Node | None:
    left, right = relation.sides
    if not (isinstance(left, Leaf) and isinstance(right, Leaf)) or left.node is None or right.node is None:
        return None
    return Node("add", (left.node, Node("neg", (right.node,))))
