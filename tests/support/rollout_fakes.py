"""Fakes for router and group tests: engines that echo, stall or die, and groups with scripted scores."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openrlhf.agents.engine import Generation
from openrlhf.rollout.requests import EngineDownError, GenerateRequest


class EchoEngine:
    """Answers each request with its own prompt after a random delay; can be killed or made silent."""

    def __init__(self, name: str, *, seed: int = 0, delay: float = 0.002) -> None:
        self.name = name
        self.served: list[GenerateRequest] = []
        self.probes = 0
        self.dead = False
        self.silent = False
        self._random = random.Random(seed)
        self._delay = delay
        self._waiting: set[asyncio.Future[None]] = set()

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.dead:
            raise EngineDownError(f"{self.name} is dead")
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(gate)
        if not self.silent:
            asyncio.get_running_loop().call_later(
                self._random.random() * self._delay, lambda: gate.done() or gate.set_result(None)
            )
        try:
            await gate
        finally:
            self._waiting.discard(gate)
        self.served.append(request)
        tokens = list(request.token_ids)
        return Generation(
            token_ids=tokens, logprobs=[-0.5] * len(tokens), versions=[0] * len(tokens), finish_reason="stop"
        )

    async def health(self) -> str:
        self.probes += 1
        if self.dead:
            raise EngineDownError(f"{self.name} is dead")
        if self.silent:
            await asyncio.Event().wait()
        return "alive"

    def kill(self) -> None:
        """Fail what is under way and everything after it."""
        self.dead = True
        for gate in self._waiting:
            if not gate.done():
                gate.set_exception(EngineDownError(f"{self.name} was killed"))


@dataclass(frozen=True)
class FakeSample:
    score: float | None
    reward: float | None = None
    failed: bool = False
    failure: str = ""
    failure_kind: str = ""
    episode: int | None = None


@dataclass(frozen=True)
class FakeGroup:
    prompt: int
    samples: Sequence[FakeSample]


def group(prompt: int, *scores: float | None) -> FakeGroup:
    """A group with these scores; None is a failed sample."""
    samples = [
        FakeSample(score=None, failed=True, failure=f"agent: boom {prompt}") if s is None else FakeSample(score=s)
        for s in scores
    ]
    return FakeGroup(prompt, samples)


class ScriptedRollout:
    """`run_group` whose groups are given, and their finishing order too: as in `order`, or random with `pauses`."""

    def __init__(
        self, make: Callable[[int], FakeGroup], order: Sequence[int] = (), pauses: random.Random | None = None
    ) -> None:
        self._make = make
        self._pauses = pauses
        self._order = list(order)
        self._finished: set[int] = set()
        self._turn = asyncio.Condition()
        self.started: list[int] = []
        self.most_running = 0
        self._running = 0

    async def __call__(self, prompt: int) -> FakeGroup:
        self.started.append(prompt)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            for _ in range(self._pauses.randint(1, 20) if self._pauses else 1):
                await asyncio.sleep(0)
            before = set(self._order[: self._order.index(prompt)]) if prompt in self._order else set()
            async with self._turn:
                await self._turn.wait_for(lambda: before <= self._finished)
                self._finished.add(prompt)
                self._turn.notify_all()
            return self._make(prompt)
        finally:
            self._running -= 1
