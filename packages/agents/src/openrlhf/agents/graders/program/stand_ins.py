"""What the tests hold of a program: stand-ins for its functions, classes and objects.

A program must not decide what its tests compare. So a stand-in never equals a plain value, whatever `__eq__` says; and
a comparison with a plain value, or arithmetic with one that would give a plain value, is refused.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from typing import Any

from openrlhf.agents.graders.program.wire import Codec, Line, Peer, describe_error

MAX_MEMBERS = 1_000_000


class Program:
    """The program at the other end of the line, as its tests see it."""

    def __init__(self, line: Line) -> None:
        self._own: list[Any] = []
        self._exceptions: dict[tuple[str, ...], type[BaseException]] = {}
        self.codec = Codec(self._keep, self._find)
        self._line = line
        self._peer = Peer(line, self._answer)

    def load(self) -> dict[str, Any]:
        """Waits until the program is imported; its names, the docstrings, and its error if it ended with one."""
        return self._line.receive()

    def do(self, deed: str, *args: Any, **kwargs: Any) -> Any:
        """Has something done with the program's objects; raises what that raises."""
        reply = self._peer.ask({"do": deed, **self.codec.pack(args, kwargs)})
        if reply.get("output"):
            sys.stdout.write(reply["output"])  # where tests may look for it
        if "error" in reply:
            kind = self.exception(tuple(reply["error"]))
            if kind in (StopIteration, StopAsyncIteration) and deed != "next":
                kind = RuntimeError  # it would end a `map` or `filter` of the tests, as if all its members had passed
            raise kind(*reply["args"])
        for arg, new in zip(args, reply["changed"], strict=True):
            if new is not None:
                _change(arg, self.codec.decode(new))
        return self.codec.decode(reply["value"])

    def exception(self, names: tuple[str, ...]) -> type[BaseException]:
        """A class of ours for an exception class of the program, given by the names of its bases."""
        own = getattr(builtins, names[0], None) if names else Exception
        if isinstance(own, type) and issubclass(own, BaseException):
            return own if issubclass(own, Exception) else RuntimeError  # an exit is no way out of the tests
        if names not in self._exceptions:
            self._exceptions[names] = type(names[0], (self.exception(names[1:]),), {})  # type: ignore[assignment]
        return self._exceptions[names]

    def _keep(self, value: Any) -> dict[str, Any]:
        if isinstance(value, StandIn):
            return {"t": "yours", "id": value._handle}
        for i, known in enumerate(self._own):
            if known is value:
                return {"t": "test", "id": i}
        self._own.append(value)
        return {"t": "test", "id": len(self._own) - 1}

    def _find(self, data: dict[str, Any]) -> Any:
        if data["t"] == "yours":
            return self._own[data["id"]]
        if data["t"] == "like":
            value = self.codec.decode(data["v"])
            return _like(value, StandIn(self, data["handle"])) if isinstance(value, tuple) else value
        if data["t"] != "handle":
            raise ValueError(data["t"])
        if data["kind"] == "exception":
            return self.exception(tuple(data["mro"]))
        stand_in = StandIn(self, data)
        return _coroutine(stand_in) if data["kind"] == "coroutine" else stand_in

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What a program may do with an object of its tests: call it, go through it, use an instance's attributes."""
        try:
            target = self._own[message["id"]]
            args, kwargs = self.codec.unpack(message)
            return {"value": self.codec.encode(self._permitted(message["do"], target, args, kwargs))}
        except Exception as error:
            return describe_error(error)

    def _permitted(self, deed: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if deed == "call":
            return target(*args, **kwargs)
        if deed == "list":
            return [item for item, _ in zip(target, range(MAX_MEMBERS), strict=False)]
        if deed == "str":
            return str(target)
        name = str(args[0])
        if name.startswith("_") or type(target).__module__ != TESTS_MODULE:
            raise AttributeError(name)
        return getattr(target, name) if deed == "get" else setattr(target, name, args[1])


TESTS_MODULE = "__tests__"


def _change(old: Any, new: Any) -> None:
    """Gives an argument, and what it holds, the content that the call left it with: others may hold that as well."""
    if isinstance(old, list) and isinstance(new, list):
        for i, (before, after) in enumerate(zip(old, new, strict=False)):
            old[i] = _changed(before, after)
        old[len(new) :] = new[len(old) :]
    elif isinstance(old, dict) and isinstance(new, dict):
        content = {key: _changed(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(content)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new


def _changed(before: Any, after: Any) -> Any:
    if not isinstance(before, list | dict | set | bytearray) or type(before) is not type(after):
        return after
    _change(before, after)
    return before


async def _coroutine(stand_in: StandIn) -> Any:
    return stand_in._do("await")


def _like(value: tuple[Any, ...], stand_in: StandIn) -> tuple[Any, ...]:
    """A tuple with the attributes that the program's one has, as of a named tuple."""

    class Named(tuple):
        def __getattr__(self, name: str) -> Any:
            return getattr(stand_in, name)

    return Named(value)


class StandIn:
    """Stands for an object of the program."""

    _program: Program
    _handle: int
    _name: str

    def __init__(self, program: Program, data: dict[str, Any]) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_handle", data["id"])
        object.__setattr__(self, "_name", data["name"])
        object.__setattr__(self, "__name__", data["name"])

    def _do(self, deed: str, *args: Any, **kwargs: Any) -> Any:
        return self._program.do(deed, self, *args, **kwargs)

    def _operate(self, deed: str, other: Any, *, swapped: bool = False) -> Any:
        result = self._program.do(deed, other, self) if swapped else self._do(deed, other)
        if not isinstance(other, StandIn) and not isinstance(result, StandIn):
            raise TypeError(f"{deed}: an object of the program's own class {self._name} with a plain value")
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):
            raise AttributeError(name)  # numpy reads memory where such an attribute says
        return self._do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set", name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn):
            return False
        return self._handle == other._handle or bool(self._do("eq", other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._do("hash")

    def __bool__(self) -> bool:
        return bool(self._do("bool"))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, StandIn) and bool(self._program.do("isinstance", instance, self))

    def __iter__(self) -> Iterator[Any]:
        source = self._do("iter")
        if not isinstance(source, StandIn):
            yield from source
            return
        while True:
            try:
                yield source._do("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._do("next")

    def __contains__(self, item: Any) -> bool:
        try:
            return any(item == member for member, _ in zip(iter(self), range(MAX_MEMBERS), strict=False))
        except TypeError:
            return bool(self._operate("contains", item))

    def __enter__(self) -> Any:
        return self._do("enter")

    def __exit__(self, *_: object) -> None:
        self._do("exit")


def _plain_result(deed: str) -> Callable[..., Any]:
    return lambda self, *args: self._do(deed, *args)


def _operator(deed: str, swapped: bool) -> Callable[..., Any]:
    return lambda self, other: self._operate(deed, other, swapped=swapped)


PLAIN = "len str repr int float complex index round abs neg pos invert reversed getitem setitem delitem"
COMPARISONS = "lt le gt ge"
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _deed in PLAIN.split():
    setattr(StandIn, f"__{_deed}__", _plain_result(_deed))
for _deed in COMPARISONS.split():
    setattr(StandIn, f"__{_deed}__", _operator(_deed, False))
for _deed in ARITHMETIC.split():
    _name = _deed.rstrip("_")
    setattr(StandIn, f"__{_name}__", _operator(_deed, False))
    setattr(StandIn, f"__r{_name}__", _operator(_deed, True))
