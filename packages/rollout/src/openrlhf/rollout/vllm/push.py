"""The weight pushes of an engine: its part of the transfer, and what holds between and after failed ones.

The base of `VllmEngine`. How the tensors travel is the business of vLLM's weight-transfer backends (`weights/`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from openrlhf.rollout.engine import EngineHealth
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.requests import EngineDownError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from openrlhf.rollout.weights.wire import BucketPlan

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 120.0
"""Longest wait for a control call (pause, cache reset, version, group set-up); they take milliseconds."""
PUSH_TIMEOUT_S = 1800.0
"""Longest wait for a whole weight push. Each message in it has the group's own, much shorter, time-out."""
GIVE_UP_TIMEOUT_S = 30.0
"""Longest wait for the end of a part of a push whose other side failed; the group's own time-out is 15 s."""
LEFT_OVER_POLL_S = 0.01
SHOWN_REQUESTS = 5
START, FINISH = "start a weight push", "finish a weight push"

T = TypeVar("T")


class WeightTaker(ABC):
    """An engine that takes weights. After a failed push it must not serve until a whole one has come."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._live: set[str] = set()
        self._paused = False
        self._unfit = ""
        self._updating = False
        self._push_over = asyncio.Event()
        self._push_step_over = asyncio.Event()
        self._push_step_over.set()
        self._push_broke = False

    @abstractmethod
    def _running(self) -> AsyncLLM: ...

    @abstractmethod
    async def _control(self, what: str, call: Awaitable[T], timeout_s: float = CONTROL_TIMEOUT_S) -> T: ...

    @abstractmethod
    async def _set_version(self, version: int) -> None: ...

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> int: ...

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Join the trainer's weight group (`GroupAddress.for_engine`, or what vLLM's trainer engine says)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._control(
            "join the weight group",
            self._running().init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)),
        )

    async def receive_weights(self, plan: BucketPlan, version: int) -> None:
        """Take part in one whole push over gloo; the trainer must be sending it at the same time.

        Afterwards every sampled token carries `version`. The prefix cache is emptied. The engine must be idle or
        paused. Raises EngineDownError when the push fails; then the engine refuses to serve until one succeeds.
        """
        if self.spec.sync_backend != "gloo":
            raise ValueError(f"an {self.spec.sync_backend} sender calls start_, update_ and finish_ itself")
        await self.start_weight_update()
        await self.update_weights({"plan": plan.to_dict(), "version": version})
        await self.finish_weight_update(version)

    async def start_weight_update(self) -> None:
        """First part of a push; nccl and ipc senders call the three parts themselves, gloo uses `receive_weights`.

        Requests that still run on an engine that is not paused belong to nobody (a sample that is over, a worker that
        died): they are aborted.
        """
        self._unfit = "a weight push has failed; it needs a complete one first"
        self._updating, self._push_broke = True, False
        self._push_over.clear()
        if self._live and not self._paused:
            await self._push_step("end left-over requests", self._end_left_over())
        await self._push_step(START, self._running().start_weight_update())

    async def _end_left_over(self) -> None:
        shown = ", ".join(sorted(self._live)[:SHOWN_REQUESTS])
        logger.warning("%s aborts %d requests left over: %s", self.name, len(self._live), shown)
        await self.abort()
        while self._live:  # noqa: ASYNC110 - they end one by one, each in its caller's task
            await asyncio.sleep(LEFT_OVER_POLL_S)

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Second part of a push: receive tensors."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=info)
        await self._push_step("receive weights", self._running().update_weights(request))

    async def finish_weight_update(self, version: int) -> None:
        """Last part of a push: the new weights become `version`."""
        await self._push_step(FINISH, self._finish(version))
        self._unfit = ""
        self._end_push()

    async def _finish(self, version: int) -> None:
        await self._running().finish_weight_update()
        await self._set_version(version)
        await self._control("reset the prefix cache", self._running().reset_prefix_cache())

    async def _leave_push(self) -> None:
        """Let workers finish that are still in a push: the last part never came, or only others failed to receive."""
        if self._unfit:
            try:
                await self._running().finish_weight_update()
            except (
                Exception
            ) as error:  # workers that are in none refuse; whatever else is wrong shows at the next start
                logger.debug("%s leaves a failed weight push: %s", self.name, error)

    def _end_push(self) -> None:
        self._updating = False
        self._push_over.set()

    async def _push_step(self, what: str, call: Awaitable[T]) -> T:
        self._push_step_over.clear()
        try:
            return await self._control(what, call, PUSH_TIMEOUT_S)
        except BaseException as error:
            self._push_broke = what in (START, FINISH)
            self._end_push()
            if isinstance(error, Exception):
                raise EngineDownError(f"{self.name} could not {what}: {error}") from error
            raise
        finally:
            self._push_step_over.set()

    async def give_up_push(self) -> EngineHealth:
        """After a push that failed elsewhere: make ready for the next one. `health` of then.

        Raises EngineDownError when this engine is stuck in it, or could not begin or end one: it must be started again.
        """
        while not self._push_step_over.is_set():
            await self._control("give up a failed weight push", self._push_step_over.wait(), GIVE_UP_TIMEOUT_S)
        await self._control("give up a failed weight push", self._leave_push())
        self._end_push()
        if self._push_broke:
            raise EngineDownError(f"{self.name} can take no weights any more: {self._unfit}")
        return await self.health()
