"""Waits for the samples of one group and ends those that hang.

An agent's own time is bounded: more than `timeout` seconds without a call to the engine ends the sample as failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from openrlhf.agents.context import SampleEngine
from openrlhf.agents.failures import failure_of, swallow
from openrlhf.agents.recorder import failed_trajectory
from openrlhf.agents.types import Failure, PromptItem, StopReason, Trajectory

GRACE = 1.0  # seconds: reset and step have their own, more precise time-out; also how long a cancelled sample gets

Task = asyncio.Task[list[Trajectory]]


async def supervise(
    tasks: Sequence[Task], engines: Sequence[SampleEngine], timeout: float, item: PromptItem
) -> list[list[Trajectory]]:
    """The results of all tasks, in order. Cancelling this cancels them all."""
    owners = dict(zip(tasks, engines, strict=True))
    cancelled: dict[Task, float] = {}
    pending = set(tasks)
    try:
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_next_deadline(pending, owners, cancelled, timeout))
            pending = _end_idle(pending, owners, cancelled, timeout)
    except asyncio.CancelledError:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=GRACE)
        raise
    return [_result(task, engine, timeout if task in cancelled else None, item) for task, engine in owners.items()]


def _next_deadline(pending: set[Task], owners: dict[Task, SampleEngine], cancelled: dict, timeout: float) -> float:
    now = time.monotonic()
    deadline = now + timeout + GRACE
    for task in pending:
        if task in cancelled:
            deadline = min(deadline, cancelled[task] + GRACE)
        elif owners[task].in_flight == 0:
            deadline = min(deadline, owners[task].last_activity + timeout + GRACE)
    return max(deadline - now, 0.0)


def _end_idle(pending: set[Task], owners: dict[Task, SampleEngine], cancelled: dict, timeout: float) -> set[Task]:
    """Cancels samples that are idle for too long; gives up those that ignored a cancel. Returns who is left."""
    now = time.monotonic()
    left = set()
    for task in pending:
        engine = owners[task]
        if task in cancelled:
            if now >= cancelled[task] + GRACE:
                task.add_done_callback(swallow)
                continue
        elif engine.in_flight == 0 and now >= engine.last_activity + timeout + GRACE:
            task.cancel()
            cancelled[task] = now
        left.add(task)
    return left


def _result(task: Task, engine: SampleEngine, timeout: float | None, item: PromptItem) -> list[Trajectory]:
    """timeout: the limit that ended the sample; None: none did."""
    if task.done() and not task.cancelled():
        error = task.exception()
        if error is None:
            return task.result()
        return [failed_trajectory(item, engine.sample_index, failure_of(error))]
    if timeout is None:
        failure = Failure(border="agent", message="the agent cancelled the task that it runs in")
        return [failed_trajectory(item, engine.sample_index, failure)]
    message = f"the agent made no call to the engine for more than `agent.timeout` {timeout:g} s"
    return [
        failed_trajectory(
            item,
            engine.sample_index,
            Failure(border="timeout", message=message),
            stop_reason=StopReason.TIMEOUT,
        )
    ]
