"""The line between a program and its tests: lines of JSON over a socket, calls in both directions.

Plain values travel by value, so the side that compares them holds values of its own; everything else stays where it
was made and travels as a handle. Of a subclass of a plain type (an `int` with an `__eq__` of its own) the plain value
travels.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import importlib
import json
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_LINE = 16 * 2**20  # bytes of one message


class LineClosedError(BaseException):
    """The other side is gone. No `Exception`: tests that catch those must not go on without a program."""


class Line:
    """Messages over a connected socket, one line each."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._buffer = bytearray()
        sys.set_int_max_str_digits(0)  # whole numbers of any length travel

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LineClosedError("the other side is gone") from error

    def receive(self) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            try:
                part = self._socket.recv(1 << 16)
            except OSError as error:
                raise LineClosedError("the other side is gone") from error
            if not part or len(self._buffer) > MAX_LINE:
                raise LineClosedError("the program ended before its tests did")
            self._buffer += part
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        try:
            message = json.loads(line)
        except ValueError as error:
            raise LineClosedError("the program wrote on the line of its tests") from error
        if not isinstance(message, dict):
            raise LineClosedError("the program wrote on the line of its tests")
        return message


PLAIN = (bool, int, float, str)
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
# Types that are rebuilt from arguments.
BUILT: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "complex": (complex, lambda v: [v.real, v.imag], complex),
    "bytes": (bytes, lambda v: [v.hex()], bytes.fromhex),
    "bytearray": (bytearray, lambda v: [v.hex()], bytearray.fromhex),
    "range": (range, lambda v: [v.start, v.stop, v.step], range),
    "Decimal": (decimal.Decimal, lambda v: [str(v)], decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], fractions.Fraction),
    "date": (datetime.date, lambda v: [v.isoformat()], datetime.date.fromisoformat),
    "datetime": (datetime.datetime, lambda v: [v.isoformat()], datetime.datetime.fromisoformat),
    "time": (datetime.time, lambda v: [v.isoformat()], datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
}
MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}


class Codec:
    """Values to JSON and back. `keep` gives a handle to what does not travel, `find` turns a handle into something."""

    def __init__(self, keep: Callable[[Any], dict[str, Any]], find: Callable[[dict[str, Any]], Any]) -> None:
        self._keep = keep
        self._find = find

    def pack(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as a part of a message."""
        return {"args": [self.encode(a) for a in args], "kwargs": {k: self.encode(v) for k, v in kwargs.items()}}

    def unpack(self, message: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments in a message. Raises LineClosedError for what no `pack` makes."""
        args, kwargs = message.get("args", []), message.get("kwargs", {})
        return [self.decode(a) for a in args], {k: self.decode(v) for k, v in kwargs.items()}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in PLAIN:
            return value
        if value is Ellipsis:
            return {"t": "ellipsis"}
        name = kind.__name__
        if SEQUENCES.get(name) is kind:
            return {"t": name, "v": [self.encode(v) for v in value]}
        if MAPPINGS.get(name) is kind or kind is collections.defaultdict:
            pairs = [[self.encode(k), self.encode(v)] for k, v in value.items()]
            return {"t": "dict" if kind is collections.defaultdict else name, "v": pairs}
        if kind is collections.deque:
            return {"t": "deque", "v": [self.encode(v) for v in value], "max": value.maxlen}
        if name in BUILT and BUILT[name][0] is kind:
            return {"t": name, "v": BUILT[name][1](value)}
        if kind.__module__ == "numpy":
            return self._encode_numpy(value)
        return self._encode_other(value)

    def _encode_numpy(self, value: Any) -> Any:
        if hasattr(value, "tolist") and hasattr(value, "dtype") and value.dtype.kind in "biufc":
            return {
                "t": "numpy",
                "v": self.encode(value.tolist()),
                "dtype": str(value.dtype),
                "shape": list(value.shape),
            }
        return self._keep(value)

    def _encode_other(self, value: Any) -> Any:
        """A subclass of a plain type as its plain value, with a handle beside it for what else it can do."""
        for plain in (int, float, str):
            if isinstance(value, plain):
                return {"t": "plain", "v": _plain(value, plain)}
        handle = self._keep(value)
        if isinstance(value, dict):
            return {"t": "like", "v": self.encode(dict(dict.items(value))), "handle": handle}
        bases: tuple[Any, ...] = (tuple, list, set, frozenset)
        for base in bases:
            if isinstance(value, base):
                return {"t": "like", "v": self.encode(base(base.__iter__(value))), "handle": handle}
        return handle

    def decode(self, data: Any) -> Any:
        """Raises LineClosedError for what no `encode` makes."""
        if not isinstance(data, dict):
            return data
        try:
            return self._decode(data)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise LineClosedError(f"the program sent no value: {error!r}") from error

    def _decode(self, data: dict[str, Any]) -> Any:
        kind = data["t"]
        if kind == "ellipsis":
            return ...
        if kind in SEQUENCES:
            return SEQUENCES[kind]([self.decode(v) for v in data["v"]])
        if kind in MAPPINGS:
            return MAPPINGS[kind]({self.decode(k): self.decode(v) for k, v in data["v"]})
        if kind == "deque":
            return collections.deque([self.decode(v) for v in data["v"]], data["max"])
        if kind in BUILT:
            return BUILT[kind][2](*data["v"])
        if kind == "numpy":
            numpy = importlib.import_module("numpy")  # where the program has it, so have its tests
            return numpy.array(self.decode(data["v"]), dtype=data["dtype"]).reshape(data["shape"])[()]
        if kind == "plain":
            return data["v"]
        return self._find(data)


def _plain(value: Any, base: type) -> Any:
    """The value of the plain type itself, whatever its subclass makes of the usual conversions."""
    if base is str:
        return "".join(str.__iter__(value))
    return int.__int__(value) if base is int else float.__float__(value)


class Peer:
    """One end of the line: asks the other, and answers what the other asks meanwhile."""

    def __init__(self, line: Line, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._line = line
        self._answer = answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._line.send(question)
        while True:
            message = self._line.receive()
            if "do" not in message:
                return message
            self._line.send(self._answer(message))

    def serve(self) -> None:
        """Answers until the other side is gone."""
        while True:
            self._line.send(self._answer(self._line.receive()))


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as a message: the names of its classes, and its arguments as far as they are plain."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return {"error": names, "args": [a if isinstance(a, (int, float, str)) else repr(a) for a in error.args][:8]}
