"""Computes expressions: exactly where all is rational, else to many digits with mpmath, and never beyond a bound.

The precision grows with the digits of an expression, so that `\\pi/3^{40}` and `\\pi/3^{41}` are far apart, and a
difference is rounding only where it lies 20 digits below that precision.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from openrlhf.agents.graders.answer.reader import Node
from openrlhf.agents.graders.answer.tokens import TooLargeError, UnreadableError

MAX_BITS = 2_100_000  # of a whole number
MAX_FRACTION_BITS = 60_000  # of a fraction: adding two needs a greatest common divisor
MAX_FACTORIAL = 5_000
MAX_STEPS = 60_000  # of one comparison; a step on long numbers counts as several
MAX_EXPONENT = 10**6  # of e, and the argument of a gamma function
MAX_ANGLE = 10**30
DIGITS, MAX_DIGITS, GUARD = 80, 1500, 20
MAX_SECONDS = 1.5  # of this thread's CPU time, should all of the above still add up

_local = threading.local()  # mpmath's precision belongs to a context; each thread has its own


def start_count() -> None:
    """Begins a comparison: from here on this thread's steps are counted."""
    _local.steps = 0
    _local.until = time.thread_time() + MAX_SECONDS


def count(weight: int = 1) -> None:
    """Counts steps. Raises TooLargeError where one comparison took too many."""
    _local.steps = getattr(_local, "steps", 0) + weight
    if _local.steps > MAX_STEPS or time.thread_time() > getattr(_local, "until", math.inf):
        raise TooLargeError("too many steps")


def context() -> Any:
    """This thread's mpmath context. Raises ImportError with the command where mpmath is missing."""
    if not hasattr(_local, "mp"):
        try:
            from mpmath import MPContext
        except ImportError as error:
            raise ImportError("math-verify is not installed: pip install 'openrlhf-agents[math]'") from error
        _local.mp = MPContext()
    return _local.mp


class OutsideError(ArithmeticError):
    """The expression has no (real) value at this point."""


class Evaluator:
    """Values of trees at one point. complex: whether roots and logarithms of negative numbers have a value.

    `scale` is the largest value met, to which rounding errors are compared.
    """

    def __init__(self, symbols: Mapping[str, Fraction], *, digits: int, complex: bool) -> None:
        self.symbols = symbols
        self.complex = complex
        self.digits = digits
        self.scale: Any = 1

    @property
    def mp(self) -> Any:
        mp = context()
        mp.dps = self.digits
        return mp

    def value(self, node: Node, *, angle: bool = False) -> Any:
        """A Fraction, or an mpmath number. Raises OutsideError, TooLargeError, UnreadableError."""
        count(1 + (self.digits // DIGITS) ** 2)
        result = self._value(node, angle)
        if isinstance(result, Fraction):
            _check_size(result)
        else:
            self._check_finite(result)
        return result

    def _check_finite(self, value: Any) -> None:
        mp = self.mp
        if not mp.isfinite(value):
            raise OutsideError("not finite")
        size = mp.fabs(value)
        if size > self.scale:
            self.scale = size
        if not self.complex and isinstance(value, mp.mpc):
            raise OutsideError("not real")

    def _value(self, node: Node, angle: bool) -> Any:
        if node.op == "number":
            return node.value
        if node.op == "symbol":
            return self.symbols[node.name]
        if node.op in ("pi", "e"):
            return +getattr(self.mp, node.op)
        if node.op == "i":
            return self.mp.mpc(0, 1)
        if node.op == "function":
            return self._function(node)
        if node.op == "call":
            return self._call(node)
        args = [self.value(arg, angle=angle) for arg in node.args]
        if node.op == "degree":
            return self.number(args[0]) * self.mp.pi / 180 if angle else args[0]
        operation = OPERATIONS.get(node.op)
        if operation is None:
            raise UnreadableError(node.op)
        return operation(self, *args)

    def number(self, value: Any) -> Any:
        """An mpmath number."""
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def numbers(self, *values: Any) -> tuple[Any, ...]:
        """All as Fractions, or all as mpmath numbers."""
        return values if all(isinstance(v, Fraction) for v in values) else tuple(map(self.number, values))

    def _function(self, node: Node) -> Any:
        name = node.name
        args = [self.value(arg, angle=name in CIRCULAR) for arg in node.args]
        x = args[0]
        if name in ("ln", "log"):
            return self._logarithm(name, x, args[1:])
        if x == 0 and name in EXACT_AT_ZERO:
            return Fraction(EXACT_AT_ZERO[name])
        mp, x = self.mp, self.number(x)
        if mp.fabs(x) > (MAX_EXPONENT if name in ("exp", "sinh", "cosh", "tanh") else MAX_ANGLE):
            raise TooLargeError(name)
        if name in ("arcsin", "arccos") and not self.complex and abs(x) > 1:
            raise OutsideError(name)
        return getattr(mp, MP_NAMES.get(name, name))(x)

    def _logarithm(self, name: str, x: Any, bases: list[Any]) -> Any:
        """`\\ln` has base e, `\\log` without one has 10."""
        if x == 0 or (not self.complex and x < 0):
            raise OutsideError(name)
        mp = self.mp
        base = bases[0] if bases else (None if name == "ln" else Fraction(10))
        if base is None:
            return mp.log(self.number(x))
        if base == 1 or base == 0 or (not self.complex and base < 0):
            raise OutsideError(name)
        return mp.log(self.number(x)) / mp.log(self.number(base))

    def _call(self, node: Node) -> Any:
        """An unknown function: some number that depends on its name and arguments only."""
        args = [self.value(arg) for arg in node.args]
        if node.name.startswith("\\"):
            return _several(node.name, args)
        spelled = [str(a) if isinstance(a, Fraction) else self.mp.nstr(a, 25) for a in args]
        return hashed(f"{node.name}({','.join(spelled)})")


def hashed(text: str) -> Fraction:
    """A number between 1 and 2 that stands for a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return 1 + Fraction(int.from_bytes(digest, "big"), 2**32 + 15)


def _check_size(value: Fraction) -> None:
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    if bits > MAX_BITS or (value.denominator != 1 and bits > MAX_FRACTION_BITS):
        raise TooLargeError("too many digits")
    if bits > 5000:
        count(bits // 100)


def _several(name: str, args: list[Any]) -> Any:
    if name in ("\\max", "\\min"):
        return (max if name == "\\max" else min)(args)
    if not all(isinstance(a, Fraction) and a.denominator == 1 for a in args):
        raise OutsideError(name)
    return Fraction((math.gcd if name == "\\gcd" else math.lcm)(*(a.numerator for a in args)))


def _add(ev: Evaluator, *args: Any) -> Any:
    return sum(ev.numbers(*args), Fraction(0)) if all(isinstance(a, Fraction) for a in args) else sum(ev.numbers(*args))


def _multiply(ev: Evaluator, *args: Any) -> Any:
    result: Any = Fraction(1)
    for arg in args:
        left, right = ev.numbers(result, arg)
        result = left * right
        if isinstance(result, Fraction):
            _check_size(result)
    return result


def _divide(ev: Evaluator, a: Any, b: Any) -> Any:
    if b == 0:
        raise OutsideError("division by zero")
    a, b = ev.numbers(a, b)
    return a / b


def _modulo(ev: Evaluator, a: Any, b: Any) -> Any:
    if b == 0:
        raise OutsideError("modulo zero")
    a, b = ev.numbers(a, b)
    return a - b * (a // b if isinstance(a, Fraction) else ev.mp.floor(a / b))


def _power(ev: Evaluator, base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Fraction):
        if isinstance(base, Fraction) and exponent.denominator == 1:
            return _whole_power(base, exponent.numerator)
        if base == 0:
            if exponent < 0:
                raise OutsideError("division by zero")
            return Fraction(0) if exponent else Fraction(1)
        if isinstance(base, Fraction) and exponent.denominator <= 64:
            root = _root(ev, base, Fraction(exponent.denominator))
            if isinstance(root, Fraction):
                return _whole_power(root, exponent.numerator)
        if not ev.complex and base < 0 and exponent.denominator % 2:
            result = _power(ev, -ev.number(base), exponent)
            return -result if exponent.numerator % 2 else result
    if not ev.complex and base < 0 and not (isinstance(exponent, Fraction) and exponent.denominator == 1):
        raise OutsideError("root of a negative number")
    mp, x = ev.mp, ev.number(base)
    y = int(exponent) if isinstance(exponent, Fraction) and exponent.denominator == 1 else ev.number(exponent)
    if x == 0:
        raise OutsideError("power of zero")
    if mp.fabs(y * mp.log(x)) > MAX_EXPONENT:
        raise TooLargeError("power")
    return mp.power(x, y)


def _whole_power(base: Fraction, exponent: int) -> Fraction:
    if base == 0 and exponent < 0:
        raise OutsideError("division by zero")
    if abs(base) in (0, 1):
        return base**exponent if abs(exponent) < 2 else base ** (2 + exponent % 2)
    bits = math.log2(max(abs(base.numerator), base.denominator)) * abs(exponent)
    if bits > MAX_BITS:
        raise TooLargeError("power")
    return Fraction(base**exponent)


def _root(ev: Evaluator, x: Any, degree: Any) -> Any:
    if degree == 0:
        raise OutsideError("root")
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree <= 1000:
        return _power(ev, x, _divide(ev, Fraction(1), degree))
    n = int(degree)
    if isinstance(x, Fraction) and (x >= 0 or n % 2):
        top, bottom = _whole_root(abs(x.numerator), n), _whole_root(x.denominator, n)
        if top is not None and bottom is not None:
            return Fraction(top, bottom) * (-1 if x < 0 else 1)
    if not isinstance(x, ev.mp.mpc) and x < 0:
        if n % 2:
            return -ev.mp.root(-ev.number(x), n)
        if not ev.complex:
            raise OutsideError("root of a negative number")
    return ev.mp.root(ev.number(x), n)


def _whole_root(x: int, n: int) -> int | None:
    if n == 2:
        root = math.isqrt(x)
    elif x.bit_length() < 1000:
        root = round(x ** (1 / n)) if x.bit_length() < 900 else 0
    else:
        return None
    return root if root**n == x else None


def _factorial(ev: Evaluator, x: Any) -> Any:
    if isinstance(x, Fraction) and x.denominator == 1:
        if x < 0:
            raise OutsideError("factorial")
        if x > MAX_FACTORIAL:
            raise TooLargeError("factorial")
        return Fraction(math.factorial(int(x)))
    x = ev.number(x)
    if ev.mp.fabs(x) > MAX_FACTORIAL:
        raise TooLargeError("factorial")
    return ev.mp.gamma(x + 1)


def _factorial2(ev: Evaluator, x: Any) -> Any:
    if not isinstance(x, Fraction) or x.denominator != 1 or x < 0:
        raise OutsideError("double factorial")
    if x > MAX_FACTORIAL:
        raise TooLargeError("factorial")
    return Fraction(math.prod(range(int(x), 0, -2)))


def _binomial(ev: Evaluator, n: Any, k: Any) -> Any:
    if all(isinstance(v, Fraction) and v.denominator == 1 and 0 <= v <= MAX_FACTORIAL for v in (n, k)):
        return Fraction(math.comb(int(n), int(k)))
    below = _multiply(ev, _factorial(ev, k), _factorial(ev, _add(ev, n, -k)))
    return _divide(ev, _factorial(ev, n), below)


def _floor(ev: Evaluator, x: Any) -> Any:
    if isinstance(x, ev.mp.mpc):
        raise OutsideError("floor")
    return Fraction(math.floor(x)) if isinstance(x, Fraction) else Fraction(int(ev.mp.floor(x)))


def _ceil(ev: Evaluator, x: Any) -> Any:
    return -_floor(ev, -x)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "mul": _multiply,
    "div": _divide,
    "mod": _modulo,
    "pow": _power,
    "root": _root,
    "factorial": _factorial,
    "factorial2": _factorial2,
    "binomial": _binomial,
    "floor": _floor,
    "ceil": _ceil,
    "neg": lambda ev, x: -x,
    "abs": lambda ev, x: abs(x),
    "percent": lambda ev, x: x / 100,
}
CIRCULAR = {"sin", "cos", "tan", "cot", "sec", "csc"}
EXACT_AT_ZERO = {"sin": 0, "cos": 1, "tan": 0, "exp": 1, "arctan": 0, "arcsin": 0, "sinh": 0, "cosh": 1, "tanh": 0}
MP_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
