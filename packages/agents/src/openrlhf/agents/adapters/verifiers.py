"""Environments of the verifiers library (0.4, `verifiers.v1`) as executors.

The environment runs unchanged: its harness talks to the policy through the chat server, its task gives the reward. An
agent file is::

    from openrlhf.agents.adapters.verifiers import VerifiersExecutor

    class AgentExecutor(VerifiersExecutor):
        env_config = {
            "taskset": {"id": "gsm8k-v1"},
            "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
        }

and `AgentExecutor.write_prompts("prompts.jsonl")` writes the dataset to train on: each row's label is the number of a
task. Only the policy's seat may be trained: a seat with a model of its own (a judge) must name its client.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from openrlhf.agents.chat.executor import OpenAIServerExecutor

SHOWN = 2000  # characters of an environment's error


class VerifiersExecutor(OpenAIServerExecutor):
    """One episode of a verifiers environment per sample.

    env_config: what `[env]` holds in a configuration file of verifiers. It is an environment of one trained seat;
    `extra_logs` carries its rewards and metrics by name, the reward is their weighted sum.
    """

    env_config: Mapping[str, Any] = {}

    _serving: _Serving | None = None

    @classmethod
    def write_prompts(cls, path: str | Path, limit: int | None = None) -> int:
        """Write one {"prompt", "label"} row per task, at most `limit`; returns their number. An endless taskset needs
        a limit. The prompt is for looking at: the harness writes the conversation."""
        environment = load_environment(cls.env_config)
        if limit is None and not environment.taskset.bounded:
            raise ValueError(f"the taskset {cls.env_config['taskset']!r} never ends: write_prompts needs a limit")
        count = 0
        with open(path, "w", encoding="utf-8") as file:
            for task in islice(environment.taskset, limit):
                row = {"prompt": task.data.prompt_text or task.data.name or "task", "label": str(task.data.idx)}
                file.write(json.dumps(row) + "\n")
                count += 1
        return count

    async def run_agent(self, prompt: str, label: Any, session_id: str) -> dict[str, Any]:
        """One episode of the task whose number is the label."""
        if self._serving is None:
            self._serving = _Serving(self.env_config, self.base_url, self.api_key)
        episode = await self._serving.run(_task_number(label), session_id)
        return _result(episode)

    async def close(self) -> None:
        """Stops the environment, then the server."""
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.stop()
        await super().close()


class _Serving:
    """A loaded environment between its start and its stop, which have to happen in one task."""

    def __init__(self, config: Mapping[str, Any], base_url: str, api_key: str) -> None:
        self.environment = load_environment(config)
        self.base_url = base_url
        self.key_variable = f"OPENRLHF_CHAT_KEY_{secrets.token_hex(4)}"  # verifiers reads keys from the environment
        os.environ[self.key_variable] = api_key
        self._tasks = _Tasks(self.environment.taskset)
        self._stopping = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        try:
            async with self.environment.serving():
                self._ready.set_result(None)
                await self._stopping.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def run(self, number: int, session_id: str) -> Any:
        """The finished episode. All sessions share one endpoint, so that verifiers keeps one client for them."""
        from verifiers.v1 import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]
        from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]

        await asyncio.shield(self._ready)
        context = ModelContext(
            model="policy",
            client=EvalClientConfig(base_url=self.base_url, api_key_var=self.key_variable),
            sampling=SamplingConfig(session_id=session_id),
        )
        return await self.environment.run_episode(self._tasks[number], context)

    async def stop(self) -> None:
        self._stopping.set()
        try:
            await self._holder
        finally:
            os.environ.pop(self.key_variable, None)


class _Tasks:
    """The tasks of a taskset by number, read as far as needed."""

    def __init__(self, taskset: Any) -> None:
        self._iterator: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []

    def __getitem__(self, number: int) -> Any:
        self._read.extend(islice(self._iterator, max(0, number + 1 - len(self._read))))
        if not 0 <= number < len(self._read):
            raise ValueError(f"label {number!r}: the taskset has {len(self._read)} tasks; see write_prompts()")
        return self._read[number]


def load_environment(config: Mapping[str, Any]) -> Any:
    """The environment of a configuration. Raises ImportError with the command that installs verifiers."""
    try:
        from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("verifiers is not installed: pip install 'openrlhf-agents[verifiers]'") from error
    if not config.get("taskset"):
        raise ValueError(f'environment needs {{"taskset": {{"id": ...}}, ...}}, got {dict(config)!r}')
    return loaders.load_environment(loaders.resolve_env_config(dict(config)))


def _task_number(label: Any) -> int:
    text = str(label)
    if not text.isdecimal():
        raise ValueError(f"label {label!r} is not the number of a task: make the dataset with write_prompts()")
    return int(text)


def _result(episode: Any) -> dict[str, Any]:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        text = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it says no reason"
        raise RuntimeError(f"the verifiers episode failed: {text[:SHOWN]}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise ValueError(f"the verifiers episode has {len(trained)} trained seats; this adapter trains exactly one")
    (trace,) = trained
    rewards = {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward, "extra_logs": {**rewards, **metrics}}
