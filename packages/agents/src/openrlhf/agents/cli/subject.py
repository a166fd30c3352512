"""What `check` and `eval` run: an agent file, or a reward file around one answer per prompt."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openrlhf.agents.agent_file import load_executor
from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, GroupContext, GroupExecutor
from openrlhf.agents.engine import Engine, SamplingParams
from openrlhf.agents.executor import SingleTurnExecutor
from openrlhf.agents.files import CodeFile, as_code, decode_text, text_lines
from openrlhf.agents.reward_file import FUNCTION, check_reward_file
from openrlhf.agents.reward_process import RewardPool
from openrlhf.agents.sampling import sample_seed
from openrlhf.agents.types import PromptItem
from openrlhf.agents.watchdog import Blocked, LoopWatchdog

FLAG = "FILE"
T = TypeVar("T")


def read_file(path: str) -> CodeFile:
    """The author's file. Raises CodeFileError where there is none."""
    return as_code(path, FLAG)


def is_reward_file(code: CodeFile) -> bool:
    """Whether a file defines `reward_func` and no class, which an agent is. A file that does not parse is no such."""
    try:
        body = ast.parse(code.source).body
    except (SyntaxError, ValueError):
        return False
    functions = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    agents = [n.name for n in body if isinstance(n, ast.ClassDef) and n.name.startswith("Agent")]
    return FUNCTION in functions and not agents


@contextlib.asynccontextmanager
async def opened(code: CodeFile, timeout: float) -> AsyncIterator[GroupExecutor]:
    """The executor of a file; afterwards its server, clients or processes are closed."""
    if is_reward_file(code):
        check_reward_file(code, columns=None, run=False)
        pool = RewardPool(code, timeout)
        try:
            await pool.start()
            yield SingleTurnExecutor(pool)
        finally:
            await pool.close()
        return
    executor: Any = load_executor(code)
    try:
        yield executor
    finally:
        if hasattr(executor, "close"):
            await executor.close()


def run_watched(work: Callable[[], Awaitable[T]], timeout: float) -> T:
    """Runs on an event loop of its own. Code of the author that blocks it ends the command: nothing else could."""

    async def watched() -> T:
        watchdog = LoopWatchdog(timeout, _end)
        watchdog.start()
        try:
            return await work()
        finally:
            watchdog.stop()

    return asyncio.run(watched())


def _end(blocked: Blocked) -> None:
    print(f"error: {blocked}", flush=True)
    os._exit(1)


def make_context(arguments: argparse.Namespace, engine: Engine, tokenizer: Any, n_samples: int) -> GroupContext:
    """A context with the limits of the command line."""
    return GroupContext(
        engine=engine,
        tokenizer=tokenizer,
        settings=EpisodeSettings(
            n_samples=n_samples,
            sampling=SamplingParams(temperature=arguments.temperature),
            max_length=arguments.max_len,
            max_new_tokens=arguments.max_new_tokens,
            agent=AgentConfig(timeout=arguments.timeout, max_turns=arguments.max_turns),
        ),
        seeds=lambda sample, turn: sample_seed(0, False, 0, 0, sample, turn),
    )


def render(item: PromptItem, tokenizer: Any, templated: bool) -> PromptItem:
    """The prompt, as a message in the chat template where that is wanted."""
    if not templated:
        return item
    messages = [{"role": "user", "content": item.prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return replace(item, prompt=text)


def read_prompts(path: Path, input_key: str, label_key: str, limit: int | None) -> list[PromptItem]:
    """The prompts of a JSONL file; what else stands in a row are its columns. ValueError names line and columns."""
    if not path.is_file():
        raise FileNotFoundError(f"--data: file not found: {str(path)!r}")
    items: list[PromptItem] = []
    try:
        lines = text_lines(decode_text(path.read_bytes()))
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path}: cannot be decoded: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(items) >= limit:
            break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--data {path}: line {number} is no JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get(input_key), str):
            columns = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"--data {path}: line {number} has no text in column {input_key!r}; it has {columns}")
        item = PromptItem(
            group_id=f"line-{number}",
            prompt=row[input_key],
            label=row.get(label_key, ""),
            position=len(items),
            datasource=str(row.get("datasource", "default")),
            columns={name: value for name, value in row.items() if name not in (input_key, label_key)},
        )
        items.append(item)
    if not items:
        raise ValueError(f"--data {path}: no prompts")
    return items
