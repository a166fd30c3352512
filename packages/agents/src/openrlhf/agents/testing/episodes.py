"""Runs agents against a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

from openrlhf.agents.config import AgentConfig
from openrlhf.agents.context import EpisodeSettings, GroupContext
from openrlhf.agents.engine import Engine
from openrlhf.agents.executor import AgentExecutorBase, MultiTurnAgentExecutor
from openrlhf.agents.proxies import keep_loopback_direct
from openrlhf.agents.sampling import sample_seed
from openrlhf.agents.testing.engine import Script, ScriptedEngine
from openrlhf.agents.testing.tokenizer import ByteTokenizer
from openrlhf.agents.types import PromptItem, Trajectory

T = TypeVar("T")


def make_context(engine: Engine | Script, **changes: Any) -> GroupContext:
    """A context around an engine or a script with test-sized limits.

    `changes` are fields of `GroupContext`, `EpisodeSettings` and `AgentConfig`.
    """
    agent = AgentConfig(**{"timeout": 10.0, **_own(AgentConfig, changes)})
    values: dict[str, Any] = {
        "engine": engine if hasattr(engine, "generate") else ScriptedEngine(engine),  # type: ignore[arg-type]
        "tokenizer": ByteTokenizer(),
        "settings": EpisodeSettings(**{"max_length": 4096, "agent": agent, **_own(EpisodeSettings, changes)}),
        "seeds": lambda sample, turn: sample_seed(0, False, 0, 0, sample, turn),
    }
    return GroupContext(**{**values, **changes})


def _own(kind: type, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes that are fields of `kind`, taken out of the others."""
    return {f.name: changes.pop(f.name) for f in fields(kind) if f.name in changes}


def run_group(
    agent: Any,
    script: Engine | Script,
    prompt: str = "hello",
    *,
    label: Any = "",
    images: Any = (),
    columns: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> list[Trajectory]:
    """All samples of one prompt. agent: an executor, an executor class, or an agent class with reset and step.

    columns: what else its row carries. Afterwards the executor is closed, as at the end of a run.
    """
    item = PromptItem(group_id="test", prompt=prompt, label=label, images=images, columns=columns)
    return _run(_run_and_close(as_executor(agent), item, make_context(script, **changes)))


def run_episode(
    agent: Any, script: Engine | Script, prompt: str = "hello", *, label: Any = "", **changes: Any
) -> Trajectory:
    """One episode: `run_episode(MyAgent, ["first answer", "second answer"], prompt="2+2?", label="4").reward`."""
    return run_group(agent, script, prompt, label=label, **{**changes, "n_samples": 1})[0]


async def _run_and_close(executor: Any, item: PromptItem, context: GroupContext) -> list[Trajectory]:
    try:
        return await executor.run_group(item, context)
    finally:
        if hasattr(executor, "close"):
            await executor.close()


def as_executor(agent: Any) -> Any:
    """An executor from an executor, an executor class, or an agent class."""
    if isinstance(agent, type):
        return agent() if issubclass(agent, AgentExecutorBase) else MultiTurnAgentExecutor(agent)
    return agent


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    keep_loopback_direct()
    return asyncio.run(coroutine)
