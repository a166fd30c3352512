"""The reward-function protocol: a Python file with `reward_func(queries, prompts, labels)`.

Checks a file before anything starts, and calls its function. The calls themselves are made in the process of
`reward_child`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Sequence
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


def check_reward_file(path: str | Path | CodeFile, *, run: bool = True, timeout: float = IMPORT_SECONDS) -> CodeFile:
    """Checks that a file defines `reward_func(queries, prompts, labels)` and returns it for shipping.

    Syntax and signature are read from the source; with `run` the file is also imported once, in another process.
    Raises CodeFileError with one clear message.
    """
    code = as_code(path, FLAG)
    _check_source(code)
    if run:
        _check_import(code, timeout)
    return code


def _check_source(code: CodeFile) -> None:
    try:
        tree = ast.parse(code.source, filename=code.path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}" if line else "unknown line"
        raise CodeFileError(f"{FLAG}: syntax error in {code.path}, {where}: {error}") from error
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == FUNCTION]
    if functions:
        _check_arguments(functions[-1].args, code)


def _check_arguments(arguments: ast.arguments, code: CodeFile) -> None:
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = len(positional) - len(arguments.defaults)
    keyword_only = [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    enough = len(positional) >= 3 or arguments.vararg is not None
    if not enough or required > 3 or set(keyword_only) - {"responses"}:
        raise CodeFileError(wrong_signature(code, f"{FUNCTION}({ast.unparse(arguments)})"))


def wrong_signature(code: CodeFile, found: str) -> str:
    return f"{FLAG}: {code.path} defines {found}, expected {SIGNATURE} (optionally with **kwargs)"


def _check_import(code: CodeFile, timeout: float) -> None:
    try:
        status, output = run_check(["-m", "openrlhf.agents.reward_child", "--check"], code_frame(code), timeout)
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
    A function with a `responses` argument or **kwargs also gets `responses`, the response part of every query.
    Import and coroutines use the one event loop of `runner`, so that clients, queues and tasks outlive a call.
    """

    def __init__(self, code: CodeFile, runner: asyncio.Runner) -> None:
        self.code = code
        self._runner = runner
        self._set_loop()
        function: Any = getattr(load_module(code), FUNCTION, None)
        if function is None:
            raise CodeFileError(f"{FLAG}: {code.path} defines no {FUNCTION}; expected {SIGNATURE}")
        if inspect.isclass(function):
            function = function()
        self.takes_responses = _check_callable(function, code)
        self.function: Callable[..., Any] = function

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], responses: Sequence[str] | None
    ) -> RewardResult:
        extra = {"responses": list(responses)} if self.takes_responses and responses is not None else {}
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


def _check_callable(function: Any, code: CodeFile) -> bool:
    """Whether the function takes `responses`. Raises CodeFileError where it cannot be called with three lists."""
    if not callable(function):
        raise CodeFileError(f"{FLAG}: {FUNCTION} in {code.path} is not callable; expected {SIGNATURE}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not say
        return False
    takes = any(p.name == "responses" or p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    try:
        signature.bind([], [], [], **({"responses": []} if takes else {}))
    except TypeError as error:
        raise CodeFileError(wrong_signature(code, f"{FUNCTION}{signature}")) from error
    return takes
