"""The process that is the program. A script, started by `supervisor`.

`main FILE NAMES`: runs FILE as `python FILE` would, with names of the prelude. `serve FILE NAMES`: imports FILE as the
module `program` and answers the calls of its tests, which stand in another process, over the line.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import inspect
import io
import operator
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from openrlhf.agents.graders.program.prelude import is_offered, offer
from openrlhf.agents.graders.program.wire import Codec, Line, LineClosedError, Peer, describe_error

LINE = 3
MAX_HANDLES = 100_000
OUTPUT_SENT = 64 * 1024  # characters of a call's output that the tests see


def main() -> None:
    mode, path, *names = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.argv = [path]
    offered = offer(names)
    if mode == "serve":
        Server(offered).run()
    else:
        run_as_main(path)


def run_as_main(path: str) -> None:
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    with open(path, encoding="utf-8-sig", errors="surrogatepass") as file:
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)


class Server:
    """Holds the program's objects and does what its tests ask for."""

    def __init__(self, offered: dict[str, Any]) -> None:
        self._offered = offered
        self._objects: dict[int, Any] = {}
        self._known: dict[int, int] = {}
        self._codec = Codec(self._keep, self._find)
        os.set_inheritable(LINE, False)
        self._peer = Peer(Line(LINE), self._answer)

    def run(self) -> None:
        line = self._peer._line
        with contextlib.suppress(LineClosedError):
            line.send(self._load())
            self._peer.serve()
        sys.stdout.flush()
        os._exit(0)

    def _load(self) -> dict[str, Any]:
        """Imports the program. What stands before an `input()` that finds nothing to read is kept."""
        spec = importlib.util.spec_from_file_location("program", sys.argv[0])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["program"] = module  # so that other processes of its own find its functions there
        error = ""
        try:
            spec.loader.exec_module(module)
        except EOFError:
            pass
        except BaseException as problem:
            error = "".join(traceback.format_exception(problem)) or repr(problem)
        values = {**self._offered, **vars(module)}
        public = {k: v for k, v in values.items() if not k.startswith("__")}
        return {"names": {k: self._export(v) for k, v in public.items()}, "error": error}

    def _export(self, value: Any) -> Any:
        """Modules, and what judges offer, the tests get from their own process."""
        if isinstance(value, types.ModuleType):
            return {"t": "module", "name": value.__name__}
        home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(home, str) and isinstance(name, str) and is_offered(home, name):
            return {"t": "global", "module": home, "name": name}
        return self._codec.encode(value)

    def _keep(self, value: Any) -> dict[str, Any]:
        if isinstance(value, TestObject):
            return {"t": "yours", "id": value._id}
        key = self._known.get(id(value))
        if key is None:
            if len(self._objects) > MAX_HANDLES:
                raise MemoryError("too many objects")
            key = len(self._objects)
            self._objects[key] = value
            self._known[id(value)] = key
        handle = {"t": "handle", "id": key, "name": getattr(type(value), "__name__", "object"), "kind": "object"}
        if isinstance(value, type):
            handle["kind"] = "exception" if issubclass(value, BaseException) else "class"
            handle["name"] = value.__name__
            handle["mro"] = [kind.__name__ for kind in value.__mro__]
        elif inspect.iscoroutine(value):
            handle["kind"] = "coroutine"
        return handle

    def _find(self, data: dict[str, Any]) -> Any:
        if data["t"] == "yours":
            return self._objects[data["id"]]
        return TestObject(self, data["id"])

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        output = io.StringIO()
        try:
            args, kwargs = self._codec.unpack(message)
            with _shown(output):
                value = DEEDS[message["do"]](*args, **kwargs)
            changed = [self._codec.encode(a) if isinstance(a, MUTABLE) else None for a in args]
            reply = {"value": self._codec.encode(value), "changed": changed}
        except LineClosedError:
            raise
        except BaseException as error:
            reply = describe_error(error)
            reply["trace"] = "".join(traceback.format_exception(error))[-4000:]
        return {**reply, "output": output.getvalue()[:OUTPUT_SENT]}

    def call_back(self, key: int, do: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Asks the tests to do something with one of their objects."""
        reply = self._peer.ask({"do": do, "id": key, **self._codec.pack(args, kwargs)})
        if "error" in reply:
            kind = next((k for n in reply["error"] if isinstance(k := getattr(builtins, n, None), type)), RuntimeError)
            raise kind(*reply["args"]) if issubclass(kind, BaseException) else RuntimeError(*reply["args"])
        return self._codec.decode(reply["value"])


class TestObject:
    """Something that belongs to the tests: a function that they pass, or an instance of a class of theirs."""

    def __init__(self, server: Server, key: int) -> None:
        object.__setattr__(self, "_server", server)
        object.__setattr__(self, "_id", key)

    _server: Server
    _id: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._server.call_back(self._id, "call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._server.call_back(self._id, "get", (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._server.call_back(self._id, "set", (name, value), {})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._server.call_back(self._id, "list", (), {}))

    def __str__(self) -> str:
        return self._server.call_back(self._id, "str", (), {})


@contextlib.contextmanager
def _shown(output: io.StringIO) -> Iterator[None]:
    """What is printed meanwhile goes to the program's output and to its tests."""
    real = sys.stdout
    try:
        with contextlib.redirect_stdout(output):
            yield
    finally:
        sys.stdout = real
        with contextlib.suppress(Exception):
            real.write(output.getvalue())


def _finish(value: Any) -> Any:
    import asyncio  # few programs need it, and it takes long to load

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _doctest() -> list[int]:
    """Runs the examples in the program's docstrings here, where they can reach nothing: failures, and how many ran."""
    import doctest

    result = doctest.testmod(sys.modules["program"])
    return [result.failed, result.attempted]


def _power(a: Any, b: Any) -> Any:
    return a**b


MUTABLE = (list, dict, set, bytearray)
DEEDS: dict[str, Callable[..., Any]] = {
    "call": operator.call,
    "get": getattr,
    "set": setattr,
    "del": delattr,
    "enter": lambda x: type(x).__enter__(x),
    "exit": lambda x, *_: type(x).__exit__(x, None, None, None),
    "await": _finish,
    "doctest": _doctest,
    "isinstance": isinstance,
    "list": list,
    "pow": _power,
    **{f.__name__: f for f in (len, iter, next, str, repr, hash, bool, int, float, complex, round, abs, reversed, dir)},
}
OPERATORS = """index getitem setitem delitem contains add sub mul truediv floordiv mod matmul and_ or_ xor lshift rshift
neg pos invert eq ne lt le gt ge"""
DEEDS |= {name: getattr(operator, name) for name in OPERATORS.split()}


if __name__ == "__main__":
    main()
