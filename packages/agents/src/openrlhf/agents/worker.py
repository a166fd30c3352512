"""Hosts one executor on one event loop: the inside of an agent worker process. Plain asyncio.

Whoever runs it in a process of its own (an actor) replaces that process when the loop is blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from openrlhf.agents.chat.tools import AnswerParser
from openrlhf.agents.context import EpisodeSettings, GroupContext, GroupExecutor
from openrlhf.agents.engine import Engine, Tokenizer
from openrlhf.agents.environments import EnvironmentExecutor
from openrlhf.agents.executor import AgentExecutorBase
from openrlhf.agents.images import ImageReader, TextOnly
from openrlhf.agents.sampling import sample_seed
from openrlhf.agents.spans import span
from openrlhf.agents.types import PromptItem, Trajectory
from openrlhf.agents.watchdog import Blocked, LoopWatchdog

CLOSE_SECONDS = 1.0
"""How long cancelled groups may take to end when a worker is closed."""


class AgentWorker:
    """Rolls prompt groups out, `agent.max_concurrency` episodes at a time.

    Example::

        worker = AgentWorker(executor, engine, tokenizer, settings, on_blocked=exit_process)
        await worker.start()
        trajectories = await worker.run_group(item)
        await worker.close()
    """

    def __init__(
        self,
        executor: GroupExecutor,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: EpisodeSettings,
        *,
        image_reader: ImageReader | None = None,
        on_blocked: Callable[[Blocked], None] | None = None,
        closers: Sequence[Callable[[], Awaitable[None]]] = (),
        parser: AnswerParser | None = None,
    ) -> None:
        self._parser = parser
        self.executor = executor
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self._image_reader = image_reader or TextOnly()
        self._closers = closers
        self._slots = asyncio.Semaphore(settings.agent.max_concurrency)
        self._watchdog = LoopWatchdog(settings.agent.timeout, on_blocked) if on_blocked else None
        self._running: set[asyncio.Task[list[Trajectory]]] = set()

    async def start(self) -> None:
        """Starts the watchdog. Call it on the loop that will run the groups."""
        if self._watchdog is not None:
            self._watchdog.start()

    async def run_group(
        self,
        item: PromptItem,
        *,
        evaluation: bool = False,
        n_samples: int | None = None,
        temperature: float | None = None,
    ) -> list[Trajectory]:
        """All samples of one prompt; evaluation has its own seeds, number of samples and temperature.

        Raises asyncio.CancelledError when the worker is closed meanwhile.
        """
        context = self.context(item, evaluation, n_samples, temperature)
        with span("group", group=item.group_id, samples=context.settings.n_samples):
            group = asyncio.ensure_future(self.executor.run_group(item, context))
            self._running.add(group)
            try:
                return await group
            finally:
                self._running.discard(group)
                group.cancel()

    def context(
        self, item: PromptItem, evaluation: bool, n_samples: int | None, temperature: float | None
    ) -> GroupContext:
        settings = self.settings
        if temperature is not None:
            settings = replace(settings, sampling=settings.sampling.with_(temperature=temperature))
        if n_samples is not None:
            settings = replace(settings, n_samples=n_samples)

        def seeds(sample: int, turn: int) -> int:
            return sample_seed(settings.seed, evaluation, item.episode, item.position, sample, turn)

        return GroupContext(
            engine=self.engine,
            tokenizer=self.tokenizer,
            settings=settings,
            seeds=seeds,
            slots=self._slots,
            image_reader=self._image_reader,
            parser=self._parser,
        )

    async def close(self) -> None:
        """Stops the watchdog, the groups under way and everything handed over (reward processes, servers)."""
        if self._watchdog is not None:
            self._watchdog.stop()
        for group in self._running:
            group.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSE_SECONDS)
        if isinstance(self.executor, AgentExecutorBase | EnvironmentExecutor):
            await self.executor.close()
        for close in self._closers:
            await close()
