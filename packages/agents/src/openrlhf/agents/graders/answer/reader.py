"""Reads one expression (not a list, a relation or a matrix) into a tree.

Unlike math-verify's reader it keeps upper and lower case, bases, primes, inverse functions and every digit apart.
Functions without brackets take the product behind them, up to the next sign or function: `\\sin 2x \\cos x`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from openrlhf.agents.graders.answer.tokens import MAX_DEPTH, Token, UnreadableError, matrix_rows

GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu",
    "xi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi",
    "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
}  # fmt: skip
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "acot", "asec",
    "ln", "log", "exp", "gcd", "lcm", "max", "min", "re", "im", "arg",
}  # fmt: skip
INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "acot", "sec": "asec"}
SEVERAL = {"gcd", "lcm", "max", "min"}
CALLED = set("fghFGH")  # letters that a bracket makes a function, not a factor
TIMES = {"*", "\\cdot", "\\times"}
DIVISIONS = {"/": "div", "\\div": "div", "\\bmod": "mod", "\\mod": "mod"}
CLOSING = {"(": {")"}, "[": {"]"}, "{": {"}"}, "\\lfloor": {"\\rfloor"}, "\\lceil": {"\\rceil"}, "|": {"|"}}
# What math-verify reads for us: operators over a range, and what follows them.
LIBRARY = {"\\sum", "\\prod", "\\int", "\\lim", "\\iint", "\\oint", "\\det", "\\partial"}


@dataclass(frozen=True, slots=True)
class Node:
    """op: what is done with args; a number has a value and decimals, a symbol or a call a name."""

    op: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)
    decimals: int | None = None


def read(tokens: list[Token]) -> Node:
    """The tree of an expression. Raises UnreadableError."""
    reader = Reader(tokens)
    node = reader.sum()
    if reader.peek() is not None:
        raise UnreadableError(f"unexpected {reader.here()!r}")
    return node


def number(value: Fraction | int, decimals: int | None = None) -> Node:
    return Node("number", value=Fraction(value), decimals=decimals)


def _times(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))


class Reader:
    """A recursive descent over tokens: sum, product, signed factor, power, primary."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0  # open |

    def peek(self, ahead: int = 0) -> Token | None:
        i = self.at + ahead
        return self.tokens[i] if i < len(self.tokens) else None

    def here(self, ahead: int = 0) -> str:
        """The spelling of the next token, "" at the end and for words."""
        token = self.peek(ahead)
        return "" if token is None or token.kind == "word" else token.text

    def take(self) -> Token:
        token = self.peek()
        if token is None:
            raise UnreadableError("it ends too early")
        self.at += 1
        return token

    def accept(self, *texts: str) -> bool:
        if self.here() and self.here() in texts:
            self.at += 1
            return True
        return False

    def expect(self, texts: set[str]) -> None:
        if self.here() not in texts:
            raise UnreadableError(f"{self.here()!r} instead of {texts}")
        self.at += 1

    def sum(self) -> Node:
        terms = [self.product()]
        while self.here() in ("+", "-"):
            minus = self.take().text == "-"
            term = self.product()
            terms.append(Node("neg", (term,)) if minus else term)
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def product(self) -> Node:
        factors = [self.signed()]
        quotients = 0
        while True:
            if self.accept(*TIMES):
                factors.append(self.signed())
            elif self.starts_factor():
                factors.append(self.power())
            elif self.here() in DIVISIONS:
                factors = [Node(DIVISIONS[self.take().text], (_times(factors), self.signed()))]
                quotients += 1
            else:
                return _times(factors)
            if quotients > MAX_DEPTH:
                raise UnreadableError("too many quotients")

    def signed(self) -> Node:
        signs = 0
        while self.here() in ("+", "-"):
            signs += self.take().text == "-"
        node = self.power()
        return Node("neg", (node,)) if signs % 2 else node

    def starts_factor(self) -> bool:
        """Whether a factor follows without a sign. Two numbers side by side are none: `2 3` is unreadable."""
        token = self.peek()
        if token is None or token.kind in ("number", "end"):
            return False
        if token.kind in ("letter", "symbol", "word", "begin"):
            return True
        if token.kind == "command":
            name = token.text[1:]
            return name in FUNCTIONS or name in GREEK or name in ("frac", "sqrt", "binom", "pi", "lfloor", "lceil")
        return token.text in ("(", "{", "[") or (token.text == "|" and not self.bars)

    def power(self) -> Node:
        base = self.postfix(self.primary())
        if not self.accept("^"):
            return base
        exponent = self.exponent()
        if exponent.op == "degree":
            return Node("degree", (base,))
        return self.postfix(Node("pow", (base, exponent)))

    def exponent(self) -> Node:
        """One argument; a number with all its digits, as `x^10` is meant."""
        signs = 0
        while self.here() in ("-", "+"):
            signs += self.take().text == "-"
        node = self.primary()
        if self.accept("^"):
            self.deeper()
            node = Node("pow", (node, self.exponent()))
            self.depth -= 1
        return Node("neg", (node,)) if signs % 2 else node

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("too deep")

    def postfix(self, node: Node) -> Node:
        for _ in range(MAX_DEPTH):
            if self.accept("!"):
                node = Node("factorial", (node,))
            elif self.accept("!!"):
                node = Node("factorial2", (node,))
            elif self.accept("%"):
                node = Node("percent", (node,))
            elif self.accept("\\degree"):
                node = Node("degree", (node,))
            else:
                return node
        raise UnreadableError("too deep")

    def primary(self) -> Node:
        self.deeper()
        node = self._primary()
        self.depth -= 1
        return node

    def _primary(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind in ("letter", "symbol"):
            return self.symbol(token)
        if token.kind == "word":
            return Node("symbol", name=f"text {token.text}")
        if token.kind == "begin":
            return self.determinant(token)
        if token.text in CLOSING:
            return self.group(token.text)
        if token.kind == "command":
            return self.command(token.text[1:])
        raise UnreadableError(f"unexpected {token.text!r}")

    def group(self, opening: str) -> Node:
        before, self.bars = self.bars, self.bars + 1 if opening == "|" else 0
        node = self.sum()
        self.expect(CLOSING[opening])
        self.bars = before
        outer = {"|": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}.get(opening)
        return Node(outer, (node,)) if outer else node

    def number(self, token: Token) -> Node:
        assert token.value is not None
        whole = number(token.value, token.decimals)
        mixed = self.mixed() if token.value.denominator == 1 and token.decimals is None else None
        return whole if mixed is None else number(token.value + mixed)

    def mixed(self) -> Fraction | None:
        """The proper fraction behind a whole number, as in `2\\frac{1}{2}` and `2 1/2`."""
        after, top, slash, bottom = self.peek(), self.peek(0), self.here(1), self.peek(2)
        if after is not None and after.kind == "number":
            if slash != "/" or top is None or bottom is None or bottom.kind != "number":
                raise UnreadableError("two numbers side by side")
            self.at += 3
            return self.proper(top.value, bottom.value)
        if self.here() != "\\frac":
            return None
        start = self.at
        self.at += 1
        values = [self.argument(), self.argument()]
        if all(v.op == "number" and v.value.denominator == 1 and v.decimals is None for v in values):
            return self.proper(values[0].value, values[1].value)
        self.at = start
        return None

    def proper(self, top: Fraction | None, bottom: Fraction | None) -> Fraction:
        if top is None or bottom is None or not 0 < top < bottom:
            raise UnreadableError("no mixed number")
        return top / bottom

    def argument(self) -> Node:
        """One argument of a command: a group, or a single sign; of a number only the first digit (`\\frac12`)."""
        token = self.take()
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            rest = Token("number", token.text[1:], token.start + 1, token.end, Fraction(token.text[1:]))
            self.at -= 1
            self.tokens = [*self.tokens[: self.at], rest, *self.tokens[self.at + 1 :]]
            return number(int(token.text[0]))
        if token.kind == "number":
            return number(token.value or Fraction(0), token.decimals)
        if token.text == "{":
            return self.group("{")
        self.at -= 1
        return self.primary()

    def symbol(self, token: Token) -> Node:
        name = token.text
        if token.kind == "letter" and name in "ei" and self.here() not in ("_", "'"):
            return Node("e" if name == "e" else "i")
        if self.accept("_"):
            name += f"_{self.subscript()}"
        while self.accept("'"):
            name += "'"
        if token.text in CALLED and self.here() in ("(", "^"):
            return self.call(name)
        return Node("symbol", name=name)

    def subscript(self) -> str:
        token = self.take()
        if token.text != "{":
            return token.text
        depth, parts = 1, []
        while depth:
            token = self.take()
            depth += (token.text == "{") - (token.text == "}")
            parts.append(token.text)
        return "".join(parts[:-1]) if len(parts) > 2 else parts[0]

    def call(self, name: str) -> Node:
        """`f(x)`, `f^{-1}(x)`; a letter without brackets behind it is a symbol."""
        start = self.at
        if self.accept("^"):
            exponent = self.exponent()
            inverse = exponent.op == "neg" and exponent.args[0].value == 1
            if not inverse or self.here() != "(":
                self.at = start
                return Node("symbol", name=name)
            name += "^-1"
        self.expect({"("})
        return Node("call", tuple(self.several(")")), name=name)

    def several(self, closing: str) -> list[Node]:
        args = [self.sum()]
        while self.accept(",", ";"):
            args.append(self.sum())
        self.expect({closing})
        return args

    def command(self, name: str) -> Node:
        if name == "frac":
            return Node("div", (self.argument(), self.argument()))
        if name == "binom":
            return Node("binomial", (self.argument(), self.argument()))
        if name == "sqrt":
            return self.root()
        if name in ("pi", "infty"):
            return Node(name)
        if name in GREEK:
            return self.symbol(Token("symbol", name, 0, 0))
        if name in FUNCTIONS:
            return self.function(name)
        opening = f"\\{name}"
        if opening in CLOSING:
            return self.group(opening)
        raise UnreadableError(f"\\{name}")

    def root(self) -> Node:
        degree = number(2)
        if self.accept("["):
            degree = self.sum()
            self.expect({"]"})
        token = self.peek()
        whole = token is not None and token.kind == "number"
        return Node("root", (self.primary_number() if whole else self.argument(), degree))

    def primary_number(self) -> Node:
        token = self.take()
        return number(token.value or Fraction(0), token.decimals)

    def function(self, name: str) -> Node:
        base, exponent = None, None
        for _ in range(2):
            if name == "log" and self.accept("_"):
                base = self.argument()
            elif self.accept("^"):
                exponent = self.exponent()
        if exponent is not None and exponent.op == "neg" and exponent.args[0].value == 1 and name in INVERSE:
            name, exponent = INVERSE[name], None
        if name in SEVERAL:
            opening = self.take().text
            if opening not in ("(", "{", "\\{"):
                raise UnreadableError(name)
            return Node("call", tuple(self.several({"(": ")", "{": "}", "\\{": "\\}"}[opening])), name=f"\\{name}")
        node = Node("function", (self.operand(),) + ((base,) if base else ()), name=name)
        return node if exponent is None else Node("pow", (node, exponent))

    def operand(self) -> Node:
        """What a function is applied to: a group, or the product that follows without one."""
        if self.here() in ("(", "{", "[", "|"):
            return self.postfix(self.primary())
        node = self.signed()
        factors = [node]
        while (token := self.peek()) is not None and self.starts_factor():
            if token.text in ("(", "{", "[", "|") or token.text[1:] in FUNCTIONS:
                break
            factors.append(self.power())
        return _times(factors)

    def determinant(self, token: Token) -> Node:
        if token.text != "vmatrix":
            raise UnreadableError(token.text)
        start = self.at - 1
        depth = 1
        while depth:
            inner = self.take()
            depth += (inner.kind == "begin") - (inner.kind == "end")
        rows = [[read(cell) for cell in row] for row in matrix_rows(self.tokens[start : self.at])]
        if len(rows) > 4 or any(len(row) != len(rows) for row in rows):
            raise UnreadableError("determinant")
        return _expand(rows)


def _expand(rows: list[list[Node]]) -> Node:
    """The determinant by its first row."""
    if len(rows) == 1:
        return rows[0][0]
    terms = []
    for column, cell in enumerate(rows[0]):
        minor = _expand([row[:column] + row[column + 1 :] for row in rows[1:]])
        term = Node("mul", (cell, minor))
        terms.append(Node("neg", (term,)) if column % 2 else term)
    return Node("add", tuple(terms))
