"""Lets requests that come at about the same time reach an idle engine core together.

vLLM's core begins with the first request that arrives and takes others between two steps, which slow each other down on
a CPU: 128 samples of ten tokens were spread over 29 steps, the first of them almost empty. So an idle core is held
until no further request has come for a moment. What is sampled does not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from openrlhf.agents.engine import EngineError

logger = logging.getLogger(__name__)

WINDOW_S = 0.004
"""A core is released when no request has come for so long: a little longer than the router's clients collect them."""
LONGEST_S = 0.04
"""A core is held no longer than this."""


class Gate:
    """hold, release: calls of the core, after which it takes requests without beginning, and begins."""

    def __init__(self, hold: Callable[[], Awaitable[None]], release: Callable[[], Awaitable[None]]) -> None:
        self._hold = hold
        self._release = release
        self._held: asyncio.Future[None] | None = None
        self._opening: asyncio.Future[None] | None = None
        self._came = 0

    async def enter(self, *, idle: bool) -> None:
        """A request is about to be handed to the core. idle: the core has none and is not paused."""
        self._came += 1
        if self._opening is None and idle:
            self._held = asyncio.ensure_future(self._hold())
            self._opening = asyncio.ensure_future(self._open(self._held))
        if self._held is not None:
            await asyncio.wait([self._held])

    async def opened(self) -> None:
        """Wait until the core is not held. Pauses and pushes do: the release would undo a pause."""
        while self._opening is not None:
            await asyncio.wait([self._opening])

    async def _open(self, held: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await held
            came, end = -1, loop.time() + LONGEST_S
            while came != self._came and loop.time() < end:
                came = self._came
                await asyncio.sleep(WINDOW_S)
            await self._release()
        except EngineError as error:  # the requests meet the same engine
            logger.debug("an engine could not be held for its first step: %s", error)
        finally:
            self._held = self._opening = None
