"""The process that holds the tests. Started by `supervisor`; the tests come on stdin.

Asserts, unittest cases, pytest-like functions and classes, doctests. Writes `PASSED` on its stdout where there were
tests and all passed; how it ends says nothing, since what a test calls may end it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import doctest
import importlib
import importlib.abc
import importlib.util
import inspect
import itertools
import linecache
import os
import re
import sys
import traceback
import types
import unittest
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any

from openrlhf.agents.graders.program.blocks import offered_names
from openrlhf.agents.graders.program.prelude import SHARED, is_offered, offer
from openrlhf.agents.graders.program.stand_ins import TESTS_MODULE, Program, StandIn
from openrlhf.agents.graders.program.wire import Line, LineClosedError

LINE = 3
PASSED = b"passed"
PR_SET_DUMPABLE = 4
FILE = "tests.py"
ALIASES = {"np": "numpy", "pd": "pandas"}
RUNNERS = re.compile(r"^(?:unittest|doctest|pytest)\.\w+$")


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process may read our memory
    tests = sys.stdin.read()
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if Judge(tests).passed():
        os.write(verdict, PASSED)


class Judge:
    """Runs the tests of one program."""

    def __init__(self, tests: str) -> None:
        self._tests = tests.replace("\r\n", "\n")
        self._program = Program(Line(LINE))
        self._found = 0

    def passed(self) -> bool:
        loaded = self._program.load()
        if loaded["error"]:
            sys.stderr.write(loaded["error"])
            return False
        given = may_be_given(loaded["names"], self._tests)
        names = {name: self._import(value) for name, value in loaded["names"].items() if name in given}
        try:
            good = self._run(names)
        except BaseException as error:
            _show(error)
            return False
        if good and not self._found:
            sys.stderr.write("no tests were found\n")
        return good and self._found > 0

    def _import(self, value: Any) -> Any:
        """A name of the program: some modules, and what judges offer, are our own; no other is loaded for it."""
        kind = value.get("t") if isinstance(value, dict) else ""
        with contextlib.suppress(Exception):
            if kind == "module":
                return importlib.import_module(value["name"]) if value["name"] in SHARED else None
            if kind == "global":
                home, name = value["module"], value["name"]
                return getattr(importlib.import_module(home), name) if is_offered(home, name) else None
            return self._program.codec.decode(value)
        return None

    def _run(self, names: dict[str, Any]) -> bool:
        module = types.ModuleType(TESTS_MODULE)
        tree = self._parse()
        names |= _own_modules(tree, names)
        module.__dict__.update(names)
        sys.modules[TESTS_MODULE] = module
        if tree is None:
            return self._doctest(self._tests, module.__dict__, "tests")
        sys.meta_path.append(ProgramFinder(names, _imported(tree)))
        offer(offered_names(self._tests))
        linecache.cache[FILE] = (len(self._tests), None, self._tests.splitlines(True), FILE)
        asked = _replace_runners()
        exec(compile(tree, FILE, "exec"), module.__dict__)
        self._found += sum(map(_is_test, tree.body))
        own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == TESTS_MODULE}
        good = self._unittests(own)
        self._functions(own)
        texts = {name: value.__doc__ for name, value in own.items()} | {"tests": ast.get_docstring(tree)}
        results = [self._doctest(text, module.__dict__, name) for name, text in texts.items() if text]
        return good and all(results) and (not asked or self._own_doctests())

    def _own_doctests(self) -> bool:
        """The examples of the program run where it runs. They are its own word, so they may fail but are no tests."""
        failed, _ = self._program.do("doctest")
        return not failed

    def _parse(self) -> ast.Module | None:
        """The tests as Python; None where they are written as a session (`>>> f(1)`)."""
        try:
            return ast.parse(self._tests, FILE)
        except SyntaxError:
            if re.search(r"^\s*>>>", self._tests, re.MULTILINE):
                return None
            raise

    def _unittests(self, own: dict[str, Any]) -> bool:
        cases = [v for v in own.values() if isinstance(v, type) and issubclass(v, unittest.TestCase)]
        loader = unittest.TestLoader()
        suite = unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases)
        result = unittest.TextTestRunner(stream=sys.stderr).run(suite) if cases else unittest.TestResult()
        self._found += result.testsRun - len(result.skipped)
        return result.wasSuccessful()

    def _functions(self, own: dict[str, Any]) -> None:
        """Functions and methods named `test…`, as pytest finds them."""
        for name, value in own.items():
            if inspect.isfunction(value) and name.startswith("test"):
                self._call(value)
            elif isinstance(value, type) and name.startswith("Test") and not issubclass(value, unittest.TestCase):
                for method in [m for m in vars(value) if m.startswith("test")]:
                    self._call(getattr(value(), method))

    def _call(self, function: Any) -> None:
        for arguments in _parameters(function):
            function(**arguments)
            self._found += 1

    def _doctest(self, text: str, names: dict[str, Any], name: str) -> bool:
        test = doctest.DocTestParser().get_doctest(text, dict(names), name, FILE, 0)
        self._found += len(test.examples)
        runner = doctest.DocTestRunner(verbose=False)
        return runner.run(test, out=sys.stderr.write).failed == 0


def may_be_given(names: Collection[str], tests: str) -> set[str]:
    """Which names of a program its tests get: not what Python looks up (`__import__`), builtins only if they test them.

    A program that is to define `f` must not decide what `abs` is in `abs(f(1) - 3) < 1e-6`. One that is to define `sum`
    is tested by nothing else of its own.
    """
    public = {name for name in names if not name.startswith("__")}
    shadows = {name for name in public if hasattr(builtins, name)}
    used = set(re.findall(r"[^\W\d]\w*", tests))
    return public - shadows if (public - shadows) & used else public


def _own_modules(tree: ast.Module | None, names: dict[str, Any]) -> dict[str, Any]:
    """Modules of which the tests use attributes (`math.isclose`), where the program calls something else so."""
    used = (
        [n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
        if tree
        else []
    )
    modules = {name: ALIASES.get(name, name) for name in used if isinstance(names.get(name), StandIn)}
    return {name: importlib.import_module(home) for name, home in modules.items() if home in SHARED and find_spec(home)}


def _imported(tree: ast.Module) -> set[str]:
    """The modules that the tests name in imports."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def _is_test(statement: ast.stmt) -> bool:
    """Whether a statement at the top level tests something: no definition, import, text, or call of a test runner."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return False
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Pass):
        return False
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return False
    if isinstance(statement, ast.Expr):
        value = statement.value
        if isinstance(value, ast.Call):
            return RUNNERS.match(ast.unparse(value.func)) is None and ast.unparse(value.func) != "print"
        return not isinstance(value, ast.Constant)
    return True


def _replace_runners() -> list[str]:
    """We run the tests ourselves, and once: a runner that is called only says that docstrings count, too."""
    asked: list[str] = []
    unittest.main = lambda *_, **__: None  # type: ignore[assignment,misc]
    doctest.testmod = lambda *_, **__: asked.append("testmod") or doctest.TestResults(0, 0)  # type: ignore[assignment]
    return asked


def _parameters(function: Any) -> Iterator[dict[str, Any]]:
    """The arguments of a test function: none, or those of `pytest.mark.parametrize`."""
    marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
    rows = []
    for mark in marks:
        names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
        values = [getattr(v, "values", v) for v in mark.args[1]]
        rows.append([dict(zip(names, v if len(names) > 1 else _single(v), strict=True)) for v in values])
    for parts in itertools.product(*rows):
        yield {k: v for part in parts for k, v in part.items()}


def _single(value: Any) -> list[Any]:
    return [value]


class ProgramFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Tests that import the program, under whatever name, get its names."""

    def __init__(self, names: dict[str, Any], asked: set[str]) -> None:
        self._names = names
        self._asked = asked - sys.stdlib_module_names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._asked else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self._names)


def _show(error: BaseException) -> None:
    if isinstance(error, LineClosedError):
        sys.stderr.write(f"{error}\n")
        return
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == FILE]
    lines = traceback.format_list(own) + traceback.format_exception_only(error)
    sys.stderr.write("Traceback (most recent call last):\n" + "".join(lines))


if __name__ == "__main__":
    main()
