"""Agent files (`--train.agent_func_path`): checked before anything starts, loaded in every agent worker.

A file exports `AgentExecutor` (constructed without arguments) or one agent class with reset and step, which is
wrapped in `MultiTurnAgentExecutor`.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from openrlhf.agents.checking import leave, run_check
from openrlhf.agents.context import GroupExecutor
from openrlhf.agents.executor import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.agents.files import CodeFile, CodeFileError, as_code
from openrlhf.agents.modules import load_module
from openrlhf.agents.signatures import check_execute

FLAG = "`agent_file`"
EXPECTED = (
    "expected a class AgentExecutor (a subclass of AgentExecutorBase or MultiTurnAgentExecutor from "
    "openrlhf.utils.agent, constructed without arguments) or one subclass of AgentInstanceBase"
)
IMPORT_SECONDS = 300.0  # imports of the author's file on a busy machine


def check_agent_file(
    path: str | Path | CodeFile, *, entry: str = "", run: bool = True, timeout: float = IMPORT_SECONDS
) -> CodeFile:
    """Checks that a file exports an agent and returns it for shipping; with `run` it is loaded in another process.

    entry: the name of the agent's class, where the file has several. Raises CodeFileError with one clear message.
    """
    code = as_code(path, FLAG)
    try:
        ast.parse(code.source, filename=code.path)
    except (SyntaxError, ValueError) as error:
        raise CodeFileError(
            f"{FLAG}: syntax error in {code.path}, line {getattr(error, 'lineno', '?')}: {error}"
        ) from error
    if run:
        _check_loading(code, entry, timeout)
    return code


def _check_loading(code: CodeFile, entry: str, timeout: float) -> None:
    program = "import sys; from openrlhf.agents.agent_file import check_main; check_main(*sys.argv[1:])"
    source = code.source.encode("utf-8", "surrogatepass")
    try:
        status, output = run_check(["-c", program, code.path, entry], source, timeout)
    except TimeoutError as error:
        raise CodeFileError(f"{FLAG}: importing {code.path} took longer than {timeout:g} s") from error
    if status != 0:
        raise CodeFileError(f"{FLAG}: {code.path} cannot be used:\n{output}")


def check_main(path: str, entry: str) -> None:
    """Entry point of the checking process: the source comes on stdin."""
    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    try:
        load_executor(CodeFile(path=path, source=source), entry)
    except CodeFileError as error:
        leave(str(error))
    except (Exception, SystemExit):
        leave(traceback.format_exc())
    leave()


def load_executor(path_or_code: str | Path | CodeFile, entry: str = "") -> GroupExecutor:
    """The executor of an agent file. Raises CodeFileError where the file exports none; its own exceptions pass.

    entry: the name of an agent or executor class in it; "": the file exports one.
    """
    code = as_code(path_or_code, FLAG)
    module = load_module(code)
    if entry:
        if not hasattr(module, entry):
            own = sorted(n for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__)
            raise CodeFileError(f"{FLAG}: {code.path} has no {entry}; its classes are {', '.join(own) or 'none'}")
        return executor_of(getattr(module, entry), code, entry)
    exported: Any = getattr(module, "AgentExecutor", None)
    if exported is None:
        return MultiTurnAgentExecutor(_find_agent_class(module, code))
    return _as_executor(exported, code, "AgentExecutor")


def executor_of(exported: Any, code: CodeFile, name: str) -> GroupExecutor:
    """The executor of what a file exports under a name: an executor, its class, or an agent class."""
    if inspect.isclass(exported) and not hasattr(exported, "run_group"):
        if not (hasattr(exported, "reset") and hasattr(exported, "step")):
            raise CodeFileError(f"{FLAG}: {name} in {code.path} is no agent; {EXPECTED}")
        return MultiTurnAgentExecutor(exported)
    return _as_executor(exported, code, name)


def _as_executor(exported: Any, code: CodeFile, name: str) -> GroupExecutor:
    if inspect.isclass(exported):
        exported = _construct(exported, code, name)
    if not hasattr(exported, "run_group"):
        raise CodeFileError(f"{FLAG}: {name} in {code.path} is no executor; {EXPECTED}")
    if isinstance(exported, AgentExecutorBase):
        check_execute(type(exported).execute)
    return exported


def _construct(executor: type, code: CodeFile, name: str) -> Any:
    if inspect.isabstract(executor):
        missing = sorted(getattr(executor, "__abstractmethods__", ()))
        raise CodeFileError(f"{FLAG}: {name} in {code.path} does not implement {missing}; {EXPECTED}")
    if inspect.iscoroutinefunction(executor.__init__):
        raise CodeFileError(
            f"{FLAG}: {name}.__init__ in {code.path} is a coroutine, and nothing awaits it: write "
            "`def __init__` and connect when execute is first called"
        )
    try:
        inspect.signature(executor).bind()
    except TypeError as error:
        raise CodeFileError(f"{FLAG}: {name} in {code.path} needs arguments ({error}); {EXPECTED}") from error
    return executor()


def _find_agent_class(module: ModuleType, code: CodeFile) -> type:
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    agents = [c for c in own if issubclass(c, AgentInstanceBase) or (hasattr(c, "reset") and hasattr(c, "step"))]
    named = [c for c in agents if c.__name__ == "AgentInstance"] or agents
    if len(named) != 1:
        found = [c.__name__ for c in named]
        raise CodeFileError(f"{FLAG}: {code.path} exports {found or 'no agent'}; {EXPECTED}")
    return named[0]
