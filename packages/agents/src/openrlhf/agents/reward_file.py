"""The reward-function protocol: a Python file with `reward_func(queries, prompts, labels)`.

Checks a file before anything starts, and calls its function. The calls themselves are made in the process of
`reward_child`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.agents.checking import run_check
from openrlhf.agents.files import CodeFile, CodeFileError, as_code
from openrlhf.agents.modules import load_module
from openrlhf.agents.rewards import RewardResult, normalize_rewards

FLAG = "`reward_file`"
FUNCTION = "reward_func"
SIGNATURE = "reward_func(queries, prompts, labels)"
IMPORT_SECONDS = 300.0
"""How long a file may take to be imported (torch, math-verify, a small model) on a busy machine."""


def check_reward_file(
    path: str | Path | CodeFile,
    *,
    columns: Collection[str] | None = (),
    run: bool = True,
    timeout: float = IMPORT_SECONDS,
) -> CodeFile:
    """Checks that a file defines `reward_func(queries, prompts, labels)` and returns it for shipping.

    columns: of the prompts, which further arguments may be named after; None: not known yet.
    Syntax and signature are read from the source; with `run` the file is also imported once, in another process.
    Raises CodeFileError with one clear message.
    """
    code = as_code(path, FLAG)
    _check_source(code, columns)
    if run:
        _check_import(code, columns, timeout)
    return code


def _check_source(code: CodeFile, columns: Collection[str] | None) -> None:
    try:
        tree = ast.parse(code.source, filename=code.path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}" if line else "unknown line"
        raise CodeFileError(f"{FLAG}: syntax error in {code.path}, {where}: {error}") from error
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == FUNCTION]
    if functions:
        _check_arguments(functions[-1].args, code, columns)


def _check_arguments(arguments: ast.arguments, code: CodeFile, columns: Collection[str] | None) -> None:
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = positional[3 : len(positional) - len(arguments.defaults)]
    keyword_only = [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    enough = len(positional) >= 3 or arguments.vararg is not None
    found = f"{FUNCTION}({ast.unparse(arguments)})"
    if not enough or len(arguments.posonlyargs) > 3:
        raise CodeFileError(wrong_signature(code, found))
    _check_names([*required, *keyword_only], columns, code, found)


def _check_names(required: Sequence[str], columns: Collection[str] | None, code: CodeFile, found: str) -> None:
    """CodeFileError where a further argument without a default is nothing that the function is given."""
    missing = [] if columns is None else [n for n in required if n not in ("responses", *columns)]
    if missing:
        there = f"those that travel are {', '.join(columns)}" if columns else "none travels"
        raise CodeFileError(
            f"{wrong_signature(code, found)}, and further arguments named after columns of the prompts; there is no "
            f"column {missing[0]!r}, {there} (`extra_keys`)"
        )


def wrong_signature(code: CodeFile, found: str) -> str:
    return f"{FLAG}: {code.path} defines {found}, expected {SIGNATURE} (optionally with **kwargs)"


def _check_import(code: CodeFile, columns: Collection[str] | None, timeout: float) -> None:
    names = json.dumps(None if columns is None else list(columns))
    try:
        status, output = run_check(["-m", "openrlhf.agents.reward_child", "--check", names], code_frame(code), timeout)
    except TimeoutError as error:
        raise CodeFileError(f"{FLAG}: importing {code.path} took longer than {timeout:g} s") from error
    if status != 0:
        raise CodeFileError(f"{FLAG}: {code.path} cannot be used:\n{output}")


def code_frame(code: CodeFile) -> bytes:
    """The file as the child's first message: path, NUL, source."""
    return f"{code.path}\0{code.source}".encode("utf-8", "surrogatepass")


def read_code_frame(frame: bytes) -> CodeFile:
    path, _, source = frame.decode("utf-8", "surrogatepass").partition("\0")
    return CodeFile(path=path, source=source)


class RewardFunction:
    """The loaded `reward_func` of a file, called with whole groups.

    Functions, coroutine functions, objects with __call__ and classes without constructor arguments are accepted.
    Beside its first three arguments a function gets, by name, those that it has among `responses` (the response part of
    every query) and the columns of the prompts, a list of one value per query each; with **kwargs it gets all.
    Import and coroutines use the one event loop of `runner`, so that clients, queues and tasks outlive a call.
    columns: names that are given, None: not known.
    """

    def __init__(self, code: CodeFile, runner: asyncio.Runner, columns: Collection[str] | None = None) -> None:
        self.code = code
        self._runner = runner
        self._set_loop()
        function: Any = getattr(load_module(code), FUNCTION, None)
        if function is None:
            raise CodeFileError(f"{FLAG}: {code.path} defines no {FUNCTION}; expected {SIGNATURE}")
        if inspect.isclass(function):
            function = function()
        self._takes = _check_callable(function, code, columns)
        self.function: Callable[..., Any] = function

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        responses: Sequence[str] | None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> RewardResult:
        extra = {} if responses is None else {"responses": responses}
        extra = {name: list(values) for name, values in {**(columns or {}), **extra}.items() if self._takes(name)}
        self._set_loop()
        result = self.function(list(queries), list(prompts), list(labels), **extra)
        if inspect.isawaitable(result):
            result = self._runner.run(_await(result))
        return normalize_rewards(result, len(queries), f"{self.code.name}: {FUNCTION}")

    def _set_loop(self) -> None:
        """For code that asks for the current loop outside of a coroutine; a call of asyncio.run takes it away."""
        asyncio.set_event_loop(self._runner.get_loop())


async def _await(result: Any) -> Any:
    return await result


def _check_callable(function: Any, code: CodeFile, columns: Collection[str] | None) -> Callable[[str], bool]:
    """Which further arguments the function takes. CodeFileError where it cannot be called with what it is given."""
    if not callable(function):
        raise CodeFileError(f"{FLAG}: {FUNCTION} in {code.path} is not callable; expected {SIGNATURE}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not say
        return lambda name: False
    further = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    lists = {p.name for p in further[:3] if p.kind is not p.KEYWORD_ONLY}
    named = [p for p in further if p.name not in lists and p.kind is not p.POSITIONAL_ONLY]
    try:
        signature.bind([], [], [], **{p.name: [] for p in named})
    except TypeError as error:
        raise CodeFileError(wrong_signature(code, f"{FUNCTION}{signature}")) from error
    _check_names([p.name for p in named if p.default is p.empty], columns, code, f"{FUNCTION}{signature}")
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return lambda name: name not in lists
    names = {p.name for p in named}
    return lambda name: name in names
