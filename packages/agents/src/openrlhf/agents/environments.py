"""Several environments in one run: a table name -> agent, and the executor that hands every prompt to its own.

A TOML file has a table per environment, and above them settings of all::

    column = "environment"        # field of the rows that names theirs; without it: datasource
    max_failure_share = 0.5       # of environments that give none of their own

    [search]
    agent = "agents/search.py"    # from the file's folder; "agents/all.py:Search" where a file has several agents
    ratio = 2                     # two of three prompts

    [maths]                       # no agent: one answer, scored by the run's reward source
    ratio = 1

A Python file has `ENVIRONMENTS = {"search": SearchAgent, "maths": {"agent": MathAgent, "ratio": 2}}`, and may have
`ENVIRONMENT_COLUMN` and `MAX_FAILURE_SHARE`.
"""

from __future__ import annotations

import ast
import json
import math
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from openrlhf.agents.agent_file import FLAG, IMPORT_SECONDS, check_agent_file, executor_of, load_executor
from openrlhf.agents.checking import leave, run_check
from openrlhf.agents.context import GroupContext, GroupExecutor
from openrlhf.agents.executor import SingleTurnExecutor
from openrlhf.agents.files import CodeFile, CodeFileError, as_code, decode_text
from openrlhf.agents.modules import load_module
from openrlhf.agents.rewards import RewardSource, apply_rewards
from openrlhf.agents.types import PromptItem, Trajectory

COLUMN = "datasource"
TABLE = "ENVIRONMENTS"
_MARK = "\nopenrlhf environments: "
_KEYS = ("agent", "ratio", "max_failure_share", "reward")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One environment. agent: its file; None: one answer, or an agent of the table's own file. entry: which class.

    ratio: its share of the prompts is this by the sum of all; None: as many as there are. max_failure_share: above this
    share of failed episodes it is switched off; None: its failures count as those of the run. scored: by the run's
    reward source, whatever its agent says.
    """

    name: str
    agent: CodeFile | None = None
    entry: str = ""
    ratio: float | None = None
    max_failure_share: float | None = None
    scored: bool = False


@dataclass(frozen=True, kw_only=True)
class EnvironmentTable:
    """The environments of a run. file: as the user gave it. column: of the rows. code: of a table in Python."""

    file: str
    column: str
    environments: tuple[Environment, ...]
    code: CodeFile | None = None

    @property
    def names(self) -> list[str]:
        return [e.name for e in self.environments]

    @property
    def scored(self) -> bool:
        """Whether one of them needs the run's reward source."""
        return any(e.scored for e in self.environments)


def read_environments(path: str) -> EnvironmentTable | None:
    """The checked table of a TOML file, or of a Python file with `ENVIRONMENTS`; None for a file of one agent.

    Agents are loaded once, in other processes. Raises CodeFileError with one clear message.
    """
    if path.endswith(".toml"):
        return _read_toml(path)
    code = as_code(path, FLAG)
    check_agent_file(code, run=False)
    targets = [t for n in ast.parse(code.source).body for t in _targets(n)]
    return _read_python(path, code) if TABLE in targets else None


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _read_toml(path: str) -> EnvironmentTable:
    file = Path(path).expanduser()
    if not file.is_file():
        raise CodeFileError(f"{FLAG}: file not found: {path!r} (looked at {file.absolute()})")
    try:
        content = tomllib.loads(decode_text(file.read_bytes()))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CodeFileError(f"{FLAG} {path!r}: no TOML: {error}") from error
    entries = {name: value for name, value in content.items() if isinstance(value, dict)}
    settings = {name: value for name, value in content.items() if name not in entries}
    codes: dict[Path, CodeFile] = {}

    def find(name: str, agent: Any) -> tuple[CodeFile | None, str]:
        if agent is None:
            return None, ""
        if not isinstance(agent, str) or not agent:
            raise CodeFileError(f'{FLAG} {path!r}, [{name}]: agent must be a file such as "agent.py", got {agent!r}')
        place, _, entry = agent.partition(".py:")
        where = file.parent / (f"{place}.py" if entry else agent)
        if where not in codes:
            codes[where] = as_code(where, f"{FLAG} {path!r}, [{name}]")
        return check_agent_file(codes[where], entry=entry), entry

    return _table(path, entries, settings, find)


def _read_python(path: str, code: CodeFile) -> EnvironmentTable:
    program = "import sys; from openrlhf.agents.environments import describe_main; describe_main(sys.argv[1])"
    source = code.source.encode("utf-8", "surrogatepass")
    try:
        status, output = run_check(["-c", program, code.path], source, IMPORT_SECONDS)
    except TimeoutError as error:
        raise CodeFileError(f"{FLAG}: importing {code.path} took longer than {IMPORT_SECONDS:g} s") from error
    if status != 0:
        raise CodeFileError(f"{FLAG}: {code.path} cannot be used:\n{output}")
    told = json.loads(output.rpartition(_MARK.strip())[2])
    return EnvironmentTable(
        file=path, column=told["column"], environments=tuple(Environment(**e) for e in told["environments"]), code=code
    )


def describe_main(path: str) -> None:
    """Entry point of the process that looks at a table in Python: the source comes on stdin, the table goes out."""
    source = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    try:
        table, _ = _python_table(CodeFile(path=path, source=source))
    except CodeFileError as error:
        leave(str(error))
    except (Exception, SystemExit):
        leave(traceback.format_exc())
    else:
        entries = [asdict(e) for e in table.environments]
        sys.stdout.write(_MARK + json.dumps({"column": table.column, "environments": entries}))
        leave()


def _python_table(code: CodeFile) -> tuple[EnvironmentTable, dict[str, GroupExecutor]]:
    module = load_module(code)
    given = getattr(module, TABLE, None)
    if not isinstance(given, Mapping):
        raise CodeFileError(f"{FLAG}: {TABLE} in {code.path} must be a dict of agents by name, got {given!r}")
    entries = {name: dict(e) if isinstance(e, Mapping) else {"agent": e} for name, e in given.items()}
    settings = {
        key: getattr(module, name)
        for key, name in (("column", "ENVIRONMENT_COLUMN"), ("max_failure_share", "MAX_FAILURE_SHARE"))
        if hasattr(module, name)
    }
    executors: dict[str, GroupExecutor] = {}

    def find(name: str, agent: Any) -> tuple[None, str]:
        if agent is None:
            raise CodeFileError(f"{FLAG}: {TABLE} in {code.path} has no agent for {name!r}")
        executors[name] = executor_of(agent, code, f"{TABLE}[{name!r}]")
        return None, ""

    return replace(_table(code.name, entries, settings, find), code=code), executors


def _table(
    file: str,
    entries: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    find: Callable[[str, Any], tuple[CodeFile | None, str]],
) -> EnvironmentTable:
    where = f"{FLAG} {file!r}"
    if not entries:
        raise CodeFileError(f"{where}: no environment: give a table such as [search] for each")
    if unknown := sorted(set(settings) - {"column", "max_failure_share"}):
        raise CodeFileError(f"{where}: unknown key {unknown[0]!r}; there are column and max_failure_share, then tables")
    column = settings.get("column", COLUMN)
    if not isinstance(column, str) or not column:
        raise CodeFileError(f"{where}: column must be the name of a field, got {column!r}")
    allowed = settings.get("max_failure_share")
    found = []
    for name, entry in entries.items():
        if unknown := sorted(set(entry) - set(_KEYS)):
            raise CodeFileError(f"{where}, [{name}]: unknown key {unknown[0]!r}; there are {', '.join(_KEYS)}")
        if not isinstance(name, str) or not name:
            raise CodeFileError(f"{where}: the name of an environment is a text, got {name!r}")
        agent, entry_point = find(name, entry.get("agent"))
        reward = entry.get("reward", "run" if entry.get("agent") is None else "agent")
        if reward not in ("agent", "run") or (reward == "agent" and entry.get("agent") is None):
            fix = '"agent" or "run" (its reward source); without an agent it is "run"'
            raise CodeFileError(f"{where}, [{name}]: reward must be {fix}, got {reward!r}")
        environment = Environment(
            name=name,
            agent=agent,
            entry=entry_point,
            ratio=_number(where, name, "ratio", entry.get("ratio"), lambda v: v > 0, "above 0"),
            max_failure_share=_number(
                where,
                name,
                "max_failure_share",
                entry.get("max_failure_share", allowed),
                lambda v: 0 <= v < 1,
                "from 0 to below 1",
            ),
            scored=reward == "run",
        )
        found.append(environment)
    without = [e.name for e in found if e.ratio is None]
    if without and len(without) < len(found):
        raise CodeFileError(f"{where}, [{without[0]}]: no ratio, but others have one; give it to all or to none")
    return EnvironmentTable(file=file, column=column, environments=tuple(found))


def _number(where: str, name: str, key: str, value: Any, right: Callable[[float], bool], expected: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not right(value):
        raise CodeFileError(f"{where}, [{name}]: {key} must be a number {expected}, got {value!r}")
    return float(value)


def load_environments(table: EnvironmentTable, source: RewardSource | None) -> EnvironmentExecutor:
    """The executors of a table. source: scores what is left to the run; None: a reward model does so later."""
    scored = {e.name for e in table.environments if e.scored and (e.agent or table.code)}
    if table.code is not None:
        return EnvironmentExecutor(_python_table(table.code)[1], scored, source)
    executors = {
        e.name: SingleTurnExecutor(source) if e.agent is None else load_executor(e.agent, e.entry)
        for e in table.environments
    }
    return EnvironmentExecutor(executors, scored, source)


class EnvironmentExecutor:
    """Hands every prompt to the executor of its environment (`PromptItem.environment`).

    scored: environments whose agents' rewards are replaced by those of `source`; without one they stay unscored.
    """

    def __init__(
        self,
        executors: Mapping[str, GroupExecutor],
        scored: set[str] | frozenset[str] = frozenset(),
        source: RewardSource | None = None,
    ) -> None:
        self.executors = executors
        self._scored = scored
        self._source = source

    async def run_group(self, item: PromptItem, ctx: GroupContext) -> list[Trajectory]:
        """All samples of one prompt."""
        trajectories = await self.executors[item.environment].run_group(item, ctx)
        if item.environment not in self._scored:
            return trajectories
        unscored = [replace(t, reward=None, score=None) for t in trajectories]
        if self._source is None:
            return unscored
        return await apply_rewards(self._source, unscored, ctx.tokenizer, item.columns)

    async def close(self) -> None:
        """Closes those that can be closed."""
        for executor in self.executors.values():
            close = getattr(executor, "close", None)
            if close is not None:
                await close()
