"""Whether two expressions are equal, or one is a constant multiple of the other.

Without symbols they are computed; with symbols they are computed at points that depend on both, of either sign: two
expressions that agree there agree (the Schwartz-Zippel lemma for polynomials). Where an expression has no real value
the point is left out. Exact numbers are compared exactly, decimals to a relative 1e-6 and one unit of the last digit
written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from openrlhf.agents.graders.answer.reader import Node
from openrlhf.agents.graders.answer.values import DIGITS, GUARD, MAX_DIGITS, Evaluator, OutsideError, context

TOLERANCE = Fraction(1, 10**6)
POINTS = 6
ENOUGH = 3  # points with a real value
SPREAD = 10**6


def equal(a: Node, b: Node) -> bool:
    """Whether two expressions have the same value wherever both have one. Raises TooLargeError, UnreadableError."""
    if infinity(a) or infinity(b):
        return infinity(a) == infinity(b)
    decimal = has_decimals(a) or has_decimals(b)
    if not symbols(a) | symbols(b):
        pair = next(values([a, b], {}), None)
        return pair is not None and close(*pair, decimal=decimal) and _within_last_digit(a, b, pair)
    found = 0
    for point in values([a, b], symbols(a) | symbols(b)):
        if not close(*point, decimal=decimal):
            return False
        found += 1
    return found >= ENOUGH


def proportional(a: Node, b: Node, *, positive: bool) -> bool:
    """Whether a = c·b with a number c ≠ 0 (or c > 0); both need the same symbols, and at least one."""
    if symbols(a) != symbols(b) or not symbols(a):
        return False
    factors = []
    for x, y, scale in values([a, b], symbols(a)):
        if x == 0 or y == 0:
            return False
        factors.append((x / y if isinstance(x, Fraction) and isinstance(y, Fraction) else _mp(x) / _mp(y), scale))
    if len(factors) < ENOUGH:
        return False
    first, _ = factors[0]
    decimal = has_decimals(a) or has_decimals(b)
    same = all(close(first, factor, scale * 10**6, decimal=decimal) for factor, scale in factors)
    return same and (not positive or first > 0)


def _mp(x: Any) -> Any:
    return context().mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else x


def values(nodes: list[Node], names: set[str] | dict[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """The values of two expressions and their scale at several points; families of points until one has real values."""
    digits = min(DIGITS + 2 * sum(map(size, nodes)), MAX_DIGITS)
    unreal = any(_has(node, "i") for node in nodes)
    if not names:
        yield from _at([{}], nodes, digits, complex=True)
        return
    ordered = sorted(names)
    seed = "|".join(sorted(repr(node) for node in nodes))
    for family in ("mixed", "positive", "whole"):
        found = list(_at(_points(ordered, family, seed), nodes, digits, complex=unreal))
        if len(found) >= ENOUGH:
            yield from found
            return
    yield from _at(_points(ordered, "mixed", seed), nodes, digits, complex=True)


def _at(points: list[dict[str, Fraction]], nodes: list[Node], digits: int, *, complex: bool) -> Iterator[Any]:
    for point in points:
        evaluator = Evaluator(point, digits=digits, complex=complex)
        try:
            results = [evaluator.value(node) for node in nodes]
        except (OutsideError, ZeroDivisionError):
            continue
        yield (*results, evaluator.scale)


def _points(names: list[str], family: str, seed: str) -> list[dict[str, Fraction]]:
    """The first point is positive, the second negative (in the family of mixed signs), the others as they come."""
    source = random.Random(f"{family} {seed}")
    result = []
    for i in range(POINTS):
        point = {}
        for name in names:
            if family == "whole":
                point[name] = Fraction(source.randint(2, 40))
                continue
            value = Fraction(source.randint(SPREAD // 2, 4 * SPREAD), source.randint(SPREAD, 2 * SPREAD))
            negative = i == 1 or (i > 1 and source.random() < 0.5)
            point[name] = -value if negative and family == "mixed" else value
        result.append(point)
    return result


def close(x: Any, y: Any, scale: Any, *, decimal: bool) -> bool:
    """Whether two values are one: exactly, up to rounding, or to the tolerance of decimals."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return abs(x - y) <= TOLERANCE * max(abs(x), abs(y)) if decimal else x == y
    mp = context()
    x, y = _mp(x), _mp(y)
    difference = mp.fabs(x - y)
    if decimal:
        return bool(difference <= max(mp.fabs(x), mp.fabs(y)) * mp.mpf(10) ** -6)
    return bool(difference <= scale * mp.mpf(10) ** (GUARD - mp.dps))


def _within_last_digit(a: Node, b: Node, pair: tuple[Any, Any, Any]) -> bool:
    """A number written as a decimal is no further off than one unit of its last digit: 1000000.5 is not 1000000."""
    written = [d for d in (last_digit(a), last_digit(b)) if d is not None]
    if not written:
        return True
    difference = _mp(pair[0]) - _mp(pair[1])
    return bool(abs(difference) <= _mp(Fraction(10) ** -min(written)))


def last_digit(node: Node) -> int | None:
    """The decimals of a plain decimal number, else None."""
    if node.op == "neg":
        return last_digit(node.args[0])
    if node.op == "percent":
        digits = last_digit(node.args[0])
        return None if digits is None else digits + 2
    return node.decimals if node.op == "number" else None


def infinity(node: Node) -> int:
    """1 or -1 for an infinity, else 0."""
    if node.op == "infty":
        return 1
    return -infinity(node.args[0]) if node.op == "neg" else 0


def symbols(node: Node) -> set[str]:
    """The names of the symbols in an expression."""
    own = {node.name} if node.op == "symbol" else set()
    return own.union(*map(symbols, node.args))


def has_decimals(node: Node) -> bool:
    return node.decimals is not None or any(map(has_decimals, node.args))


def _has(node: Node, op: str) -> bool:
    return node.op == op or any(_has(arg, op) for arg in node.args)


def size(node: Node) -> int:
    """About how many digits the numbers in an expression have, their powers and products taken into account."""
    if node.op == "number":
        return (node.value.numerator.bit_length() + node.value.denominator.bit_length()) * 3 // 10
    sizes = [size(arg) for arg in node.args]
    if node.op == "pow" and not symbols(node.args[1]):
        exponent = node.args[1].args[0] if node.args[1].op == "neg" else node.args[1]
        if exponent.op == "number":
            return min(sizes[0] * (1 + int(abs(exponent.value))), MAX_DIGITS)
    total = sum(sizes) if node.op in ("mul", "div") else max(sizes, default=0)
    return min(total * 4 if node.op == "factorial" else total, MAX_DIGITS)
