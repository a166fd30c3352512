"""Spreads generation requests over engines and moves them when one fails. Pure asyncio: engines are `EngineClient`s.

A `Router` is the `Engine` that agents see. Requests of one prompt group stay on one engine, where they share the
cached prompt; a new group goes to the engine with the fewest outstanding tokens. Which engine serves a request never
changes its result: every sample carries its own seed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.agents.engine import EngineError, Generation, SamplingParams
from openrlhf.rollout.loads import Loads
from openrlhf.rollout.requests import EngineDownError, GenerateRequest

logger = logging.getLogger(__name__)

MAX_MOVES = 3
"""A request under which this many engines died is taken to be the cause, the last time alone among the suspects."""
MAX_EVICTIONS = 20
"""How often a request may leave engines that were given up for another reason than its own call."""
REMEMBERED_GROUPS = 65536
UNKNOWN_LENGTH_TOKENS = 1024
"""Assumed answer length, for balancing only, of a request without max_tokens."""


class EngineClient(Protocol):
    """One engine as the router reaches it."""

    name: str

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises EngineDownError when the engine is at fault, another EngineError when the request is."""
        ...

    async def health(self) -> Any:
        """Any answer is a sign of life. Raises EngineDownError when the engine is gone."""
        ...


@dataclass(frozen=True, kw_only=True)
class RouterTimeouts:
    """Seconds. An engine with requests is probed every `probe_interval`; no answer in `probe`: it is silent.

    no_engine: how long requests wait for an engine to come back when none is left: the restart of a large model.
    """

    probe_interval: float = 30.0
    probe: float = 60.0
    no_engine: float = 2400.0


@dataclass(eq=False)
class _Slot:
    """An engine's state. `lost` is completed with the reason once the engine is given up."""

    client: EngineClient
    lost: asyncio.Future[str]
    tokens: int = 0
    requests: int = 0

    @property
    def up(self) -> bool:
        return not self.lost.done()


@dataclass
class _Moves:
    """What made a request move. losses: what its own calls said of engines that died under them."""

    losses: list[str] = field(default_factory=list)
    evictions: int = 0


class _EvictedError(EngineDownError):
    """The engine was given up while the request's own call was still waiting: no fault of the request."""


class Router:
    """The agents' `Engine` over several engines. All calls must come from one event loop.

    Where an engine dies every request on it is lost, and one of them may be the cause. Requests that lost two engines
    are suspects and run one at a time, until the one that takes its engine with it is found; only that one fails.
    """

    def __init__(
        self, clients: Sequence[EngineClient], *, timeouts: RouterTimeouts | None = None, first: int = 0
    ) -> None:
        """first: which engine the first group goes to; routers of different workers start at different ones."""
        self._timeouts = timeouts or RouterTimeouts()
        self._first = first
        self._clients = list(clients)
        self._slots: dict[str, _Slot] | None = None
        self._loads: Loads[_Slot] = Loads(())
        self._groups: OrderedDict[str, str] = OrderedDict()
        self._numbers = itertools.count()
        self._alone = asyncio.Lock()
        self._convicted = 0
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    def set_clients(self, clients: Sequence[EngineClient]) -> None:
        """Use these engines from now on, all of them taken to be fit.

        An engine that stays keeps its requests, and they still count; those of others move at once.
        """
        self._clients = list(clients)
        if self._slots is not None:
            for slot in self._slots.values():
                if slot.up and slot.client not in clients:
                    self._mark_down(slot, "it serves no longer")
            old = {slot.client: slot for slot in self._slots.values() if slot.up}
            self._use({c.name: old[c] if c in old else self._new_slot(c) for c in clients})
        self._changed.set()
        self._changed = asyncio.Event()

    def down(self) -> dict[str, str]:
        """Engines that are marked down, with the reason."""
        return {name: slot.lost.result() for name, slot in self._table().items() if not slot.up}

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        images: Sequence[Any] | None = None,
        *,
        group_id: str = "",
    ) -> Generation:
        """One sample from whichever engine can give it.

        Raises RequestRejectedError when an engine refuses the request, EngineError when no engine can serve it.
        """
        request = GenerateRequest(
            request_id=f"{group_id or 'request'}-{next(self._numbers)}",
            token_ids=token_ids,
            sampling=sampling,
            images=images,
            group_id=group_id,
        )
        weight = len(token_ids) + (sampling.max_tokens or UNKNOWN_LENGTH_TOKENS)
        moves = _Moves()
        while True:
            if len(moves.losses) < MAX_MOVES - 1:
                answer = await self._try_once(request, weight, moves)
            else:
                answer = await self._try_alone(request, weight, moves)
            if answer is not None:
                return answer

    async def _try_alone(self, request: GenerateRequest, weight: int, moves: _Moves) -> Generation | None:
        """One at a time. Raises EngineError when another engine dies under the request."""
        known = self._convicted
        async with self._alone:
            if self._convicted != known:  # another request turned out to be the cause
                moves.losses.clear()
                return None
            answer = await self._try_once(request, weight, moves)
            if len(moves.losses) >= MAX_MOVES:
                self._convicted += 1
                raise EngineError(
                    f"request {request.request_id} failed on {len(moves.losses)} engines: {'; '.join(moves.losses)}"
                )
            return answer

    async def _try_once(self, request: GenerateRequest, weight: int, moves: _Moves) -> Generation | None:
        """The answer; None when the request has to move."""
        slot = await self._choose(request, moves.losses)
        try:
            return await self._call(slot, request, weight)
        except _EvictedError as error:
            moves.evictions += 1
            if moves.evictions > MAX_EVICTIONS:
                raise EngineError(
                    f"request {request.request_id} lost {moves.evictions} engines, the last time: {error}"
                ) from error
        except EngineDownError as error:
            moves.losses.append(str(error))
            self._mark_down(slot, str(error))
        logger.warning("request %s moves away from %s", request.request_id, slot.client.name)
        return None

    async def close(self) -> None:
        """End the watch over the engines."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None

    def _table(self) -> dict[str, _Slot]:
        return self._use({c.name: self._new_slot(c) for c in self._clients}) if self._slots is None else self._slots

    def _use(self, slots: dict[str, _Slot]) -> dict[str, _Slot]:
        self._slots = slots
        order = list(slots.values())
        shift = self._first % max(len(order), 1)
        self._loads = Loads(order[shift:] + order[:shift])
        for slot in order:
            self._loads.add(slot, slot.tokens)
        return slots

    @staticmethod
    def _new_slot(client: EngineClient) -> _Slot:
        return _Slot(client, asyncio.get_running_loop().create_future())

    async def _choose(self, request: GenerateRequest, failures: list[str]) -> _Slot:
        """The group's engine while it is up, else the one with the fewest outstanding tokens."""
        deadline = asyncio.get_running_loop().time() + self._timeouts.no_engine
        while True:
            home = self._table().get(self._groups.get(request.group_id, ""))
            slot = home if home is not None and home.up else self._loads.least()
            if slot is not None:
                self._remember(request.group_id, slot.client.name)
                return slot
            reasons = "; ".join([*failures, *(f"{n}: {r}" for n, r in self.down().items())])
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise EngineError(
                    f"no engine can serve request {request.request_id}; waited {self._timeouts.no_engine:g} s for one "
                    f"to come back ({reasons})"
                ) from None

    def _remember(self, group_id: str, name: str) -> None:
        if group_id:
            self._groups[group_id] = name
            self._groups.move_to_end(group_id)
            if len(self._groups) > REMEMBERED_GROUPS:
                self._groups.popitem(last=False)

    async def _call(self, slot: _Slot, request: GenerateRequest, weight: int) -> Generation:
        """Wait for the answer or for the engine to be given up, whichever comes first."""
        self._count(slot, weight, 1)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_engines())
        call = asyncio.ensure_future(slot.client.generate(request))
        try:
            await asyncio.wait((call, slot.lost), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise _EvictedError(f"{slot.client.name} was given up: {slot.lost.result()}")
            return call.result()
        finally:
            call.cancel()
            self._count(slot, -weight, -1)

    def _count(self, slot: _Slot, tokens: int, requests: int) -> None:
        slot.tokens += tokens
        slot.requests += requests
        self._loads.add(slot, tokens)

    def _mark_down(self, slot: _Slot, reason: str) -> None:
        if slot.up:
            slot.lost.set_result(reason)
            self._loads.drop(slot)
            logger.warning(
                "%s is marked down with %d requests under way, which move: %s", slot.client.name, slot.requests, reason
            )

    async def _watch_engines(self) -> None:
        """Probe engines that owe answers; ends when none does."""
        while True:
            await asyncio.sleep(self._timeouts.probe_interval)
            busy = [s for s in self._table().values() if s.up and s.requests]
            await asyncio.gather(*(self._probe(slot) for slot in busy))
            if not any(s.requests for s in self._table().values()):
                return

    async def _probe(self, slot: _Slot) -> None:
        try:
            await asyncio.wait_for(slot.client.health(), self._timeouts.probe)
        except TimeoutError:
            self._mark_down(slot, f"{slot.client.name} is silent: no sign of life in {self._timeouts.probe:g} s")
        except EngineError as error:
            self._mark_down(slot, str(error))
