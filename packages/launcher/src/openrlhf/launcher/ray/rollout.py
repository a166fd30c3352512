"""The trainer's `Rollout` over agent workers: which worker rolls a prompt out, and what happens when one dies."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayTaskError

from openrlhf.agents.recorder import failed_group
from openrlhf.agents.types import Failure, PromptItem
from openrlhf.launcher.logging.sinks import GeneratedSample
from openrlhf.launcher.ray.agent_actor import AgentActor
from openrlhf.launcher.ray.calls import DEATHS, WorkerDiedError, first_line, gather, user_error
from openrlhf.launcher.ray.engine_actor import EngineActor
from openrlhf.launcher.ray.engine_fleet import EngineFleet
from openrlhf.launcher.ray.remote import Remote, ask_all, ask_living
from openrlhf.launcher.rewards.sources import reward_metrics
from openrlhf.launcher.samples import EvalRequest, Group, sample_info
from openrlhf.launcher.tracing import traceparent
from openrlhf.rollout.loads import Loads

log = logging.getLogger(__name__)

START_TIMEOUT = 600.0
ASK_TIMEOUT = 60.0
FETCH_TIMEOUT = 300.0
MAX_REPLACED = 20
"""Agent workers that may be lost in a row, with no group finished in between: such an agent is a bug."""
MANY_DEATHS = 2
"""Workers that may die under a group before it counts as a suspect."""


class Watch(Protocol):
    """What looks after the engines as long as the run lasts."""

    async def stop(self) -> None: ...


class Shutdown(Protocol):
    """What ends with the rollout."""

    async def shutdown(self) -> None: ...


class RayRollout:
    """Hands prompts to the agent worker with the fewest running groups.

    A worker that dies or blocks is replaced and its groups are rolled out again elsewhere. Groups to which that happens
    twice run one at a time, until the one that takes its worker with it is found; only that one fails. group_timeout
    bounds one group in seconds, counted from the last group that its worker finished: waiting in a queue there (for a
    slot, for the reward function) is no fault of the group. silence is the time that a worker may say nothing; decode
    turns token ids into text.
    """

    def __init__(
        self,
        spawn: Callable[[int], Remote[AgentActor]],
        fleet: EngineFleet,
        *,
        workers: int,
        group_timeout: float,
        silence: float,
        decode: Callable[[Sequence[int]], str],
        n_samples: int,
        max_len: int,
    ) -> None:
        self._n_samples = n_samples
        self._max_len = max_len
        self._decode = decode
        self._spawn = spawn
        self._fleet = fleet
        self.workers = [spawn(i) for i in range(workers)]
        self._running = Loads(range(workers))
        self._finished = [-math.inf] * workers  # when a worker last finished a group
        self._replaced = 0
        self._alone = asyncio.Lock()
        self._convicted = 0
        self._group_timeout = group_timeout
        self._silence = silence
        self._fatal: BaseException | None = None
        self._failed = asyncio.Event()
        self._awaited: set[asyncio.Future[Any]] = set()
        self.watch: Watch | None = None
        self.has_rewards = False
        self.judges: Shutdown | None = None
        self._reward_totals: Mapping[str, float] = {}

    async def start(self) -> None:
        """Until every worker has loaded its executor; a broken agent or reward file is reported here."""
        await ask_all(self.workers, "agent worker start", START_TIMEOUT, AgentActor.ready)

    async def engines_changed(self, engines: Sequence[Remote[EngineActor]]) -> None:
        """Tell every worker which engine actors serve now. A dead worker is told when it is started again."""
        await ask_living(self.workers, "engine list", ASK_TIMEOUT, AgentActor.set_engines, list(engines))

    async def engines_down(self) -> dict[str, str]:
        """Engines that some worker has given up, with the reason."""
        answers = await ask_living(self.workers, "engine state", ASK_TIMEOUT, AgentActor.engines_down)
        return {name: why for down in answers for name, why in down.items()}

    async def replace_silent_workers(self) -> None:
        """Ask every worker for a sign of life and replace those that give none; their groups start again elsewhere.

        A worker watches its own loop, but code that holds the interpreter (a regular expression, say) stops that too.
        """
        await asyncio.gather(*(self._replace_if_silent(number, worker) for number, worker in enumerate(self.workers)))

    async def _replace_if_silent(self, number: int, worker: Remote[AgentActor]) -> None:
        try:
            await ask_all([worker], "sign of life", self._silence, AgentActor.engines_down)
        except WorkerDiedError as error:
            await self._replace(number, worker, str(error))

    def fail(self, error: BaseException) -> None:
        """End the run: every group that is or will be under way raises `error`."""
        self._fatal = self._fatal or error
        self._failed.set()
        for answer in self._awaited:
            answer.cancel()

    async def failure(self) -> BaseException:
        """Wait for what `fail` is told."""
        await self._failed.wait()
        assert self._fatal is not None
        return self._fatal

    async def run_group(self, item: PromptItem, *, evaluation: EvalRequest | None = None) -> Group:
        deaths = 0
        while True:
            if deaths < MANY_DEATHS:
                group, _ = await self._try_once(item, evaluation)
                if group is not None:
                    return group
                deaths += 1
                continue
            known = self._convicted
            async with self._alone:
                if self._convicted == known:
                    group, why = await self._try_once(item, evaluation)
                    self._convicted += group is None
                    return group or self._lost(item, evaluation, why)
            deaths = 0  # another group turned out to be the cause

    async def _try_once(self, item: PromptItem, evaluation: EvalRequest | None) -> tuple[Group | None, str]:
        """The group; None and the reason when its worker was lost, which is replaced then."""
        number = self._running.least()
        assert number is not None, "workers are replaced, never given up"
        worker = self.workers[number]
        self._running.add(number, 1)
        try:
            group = await self._run_on(number, worker, item, evaluation)
        except (WorkerDiedError, *DEATHS) as error:
            if self._fatal is not None:
                raise
            await self._replace(number, worker, first_line(error))
            return None, first_line(error)
        finally:
            self._running.add(number, -1)
        self._finished[number] = asyncio.get_running_loop().time()
        self._replaced = 0
        return group, ""

    def _lost(self, item: PromptItem, evaluation: EvalRequest | None, why: str) -> Group:
        """A group that was the only suspect when a worker died: its samples failed, the run goes on."""
        message = f"group {item.group_id} was lost with {MANY_DEATHS + 1} agent workers, the last time: {why}"
        log.warning("%s", message)
        count = evaluation.n_samples_per_prompt if evaluation else self._n_samples
        trajectories = failed_group(item, count, Failure(border="agent", message=message))
        infos = [sample_info(t, max_len=self._max_len) for t in trajectories]
        return Group(prompt=item, samples=infos, handle=ray.put(trajectories))

    async def read_samples(self, group: Group, count: int) -> list[GeneratedSample]:
        trajectories = (await self.fetch(group))[:count]
        return [
            GeneratedSample(text=self._decode(t.token_ids), label=str(t.label), reward=t.reward) for t in trajectories
        ]

    async def fetch(self, group: Group) -> Any:
        name = f"the store of group {group.prompt.group_id}"
        return (await gather([group.handle], what="samples", names=[name], timeout=FETCH_TIMEOUT))[0]

    async def store(self, trajectories: Any) -> Any:
        return ray.put(trajectories)

    async def sleep(self) -> None:
        async with self._fleet.lock:
            await self._fleet.sleep()

    async def worker_metrics(self) -> dict[str, float]:
        return await self._fleet.metrics() | await self._reward_metrics()

    async def _reward_metrics(self) -> dict[str, float]:
        """Of the span since the last call; nothing where a worker was lost in it, for its counts begin anew."""
        if not self.has_rewards:
            return {}
        answers = await ask_living(self.workers, "reward counts", ASK_TIMEOUT, AgentActor.reward_totals)
        totals = {key: sum(answer.get(key, 0.0) for answer in answers) for key in {k for a in answers for k in a}}
        before, self._reward_totals = self._reward_totals, totals
        span = {key: value - before.get(key, 0.0) for key, value in totals.items()}
        return {} if min(span.values(), default=0.0) < 0 else reward_metrics(span)

    async def wake(self) -> None:
        async with self._fleet.lock:
            await self._fleet.wake_weights()
            await self._fleet.wake_cache()

    async def _run_on(
        self, number: int, worker: Remote[AgentActor], item: PromptItem, evaluation: EvalRequest | None
    ) -> Group:
        infos, handle = worker.ask_two(AgentActor.run_group, item, evaluation, traceparent())
        answer = asyncio.wrap_future(infos.future())
        try:
            await self._answer_or_silence(answer, number)
            if self._fatal is not None:
                raise self._fatal.with_traceback(None)  # else it grows by the way of every group that raises it
            if not answer.done():
                raise WorkerDiedError(f"no answer within {self._group_timeout:.0f} s")
            samples = answer.result()
        except RayTaskError as error:
            raise user_error(error) from error
        finally:
            answer.cancel()
        return Group(prompt=item, samples=samples, handle=handle)

    async def _answer_or_silence(self, answer: asyncio.Future[Any], number: int) -> None:
        """Until the answer or the end of the run, at most group_timeout without a group that the worker finishes."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._awaited.add(answer)
        try:
            while (left := max(began, self._finished[number]) + self._group_timeout - loop.time()) > 0:
                if self._fatal is not None or (await asyncio.wait((answer,), timeout=left))[0]:
                    return
        finally:
            self._awaited.discard(answer)

    async def _replace(self, number: int, worker: Remote[AgentActor], why: str) -> None:
        if self.workers[number] is not worker:
            return  # another group saw it first
        self._replaced += 1
        if self._replaced > MAX_REPLACED:
            raise WorkerDiedError(f"{self._replaced} agent workers were lost in a row, the last one: {why}")
        log.warning("%s is gone (%s): starting it again", worker.name, why)
        worker.kill()
        self.workers[number] = self._spawn(number)

    async def shutdown(self) -> None:
        if self.watch is not None:
            await self.watch.stop()
        for worker in self.workers:
            worker.ask(AgentActor.shutdown)
        await self._fleet.shutdown()
        if self.judges is not None:
            await self.judges.shutdown()
        for worker in self.workers:
            worker.kill()
