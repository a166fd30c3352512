"""Bounded calls on Ray actors: every wait has a name and a bound, and an error says which actor died doing what."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

R = TypeVar("R")

DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""How Ray says that a worker is gone; one that Ray itself ended for want of memory is an error of its own kind."""
DEATH_NOTICE = 10.0
"""Seconds in which a worker's death becomes known after its peers failed: their connection breaks first."""


class WorkerDiedError(RuntimeError):
    """A worker process ended, or did not answer in time; the message names it and what it was doing."""


def wait_seconds(bound: float) -> float:
    """How long to wait; OPENRLHF_WAIT_SCALE stretches all bounds on slow machines."""
    return bound * float(os.environ.get("OPENRLHF_WAIT_SCALE", "1"))


async def gather(refs: Sequence[Awaitable[R]], *, what: str, names: Sequence[str], timeout: float) -> list[R]:
    """Await all references; the first failure ends the wait and is raised, a death with the worker's name.

    Raises WorkerDiedError when a worker ended or the time ran out, else the worker's own exception. A death goes before
    the errors that it causes in other workers, also when it shows up after them.
    """
    tasks = {
        asyncio.ensure_future(_named(ref, what, name)): i for i, (ref, name) in enumerate(zip(refs, names, strict=True))
    }
    pending = set(tasks)
    try:
        if tasks:
            bound = wait_seconds(timeout)
            done, pending = await asyncio.wait(tasks, timeout=bound, return_when=asyncio.FIRST_EXCEPTION)
            failures = [error for task in done if (error := task.exception()) is not None]
            if failures:
                raise await _cause(failures, pending)
        if pending:
            late = sorted(names[tasks[t]] for t in pending)
            raise WorkerDiedError(f"{what}: no answer from {', '.join(late)} within {timeout:.0f} s")
    finally:
        for task in pending:
            task.cancel()
    return [task.result() for task in tasks]


async def unless(lost: Awaitable[BaseException], work: Awaitable[R], *, notice: float = DEATH_NOTICE) -> R:
    """Await `work`; once there is an error in `lost` that it can't get over, `work` has `notice` seconds to end.

    What it raises then says more. Raises the error of `lost` where it goes on waiting: for an actor that no node is
    left for, say.
    """
    task, found = asyncio.current_task(), asyncio.ensure_future(lost)
    assert task is not None

    async def end() -> None:
        await asyncio.wait((found,))
        await asyncio.sleep(notice)
        task.cancel()

    ending = asyncio.create_task(end())
    try:
        return await work
    except asyncio.CancelledError:
        if ending.done() and not ending.cancelled():
            raise found.result() from None
        raise
    finally:
        ending.cancel()
        found.cancel()


async def _cause(failures: Sequence[BaseException], pending: set[asyncio.Task[Any]]) -> BaseException:
    """The death among these failures or those to come, else a user's mistake, else the first of them."""
    known, deadline = list(failures), asyncio.get_running_loop().time() + DEATH_NOTICE
    while pending and not any(isinstance(error, (WorkerDiedError, ValueError)) for error in known):
        left = deadline - asyncio.get_running_loop().time()
        done, pending = await asyncio.wait(pending, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        known += [error for task in done if (error := task.exception()) is not None]
    return min(known, key=lambda error: (not isinstance(error, WorkerDiedError), not isinstance(error, ValueError)))


async def _named(ref: Awaitable[R], what: str, name: str) -> R:
    try:
        return await ref
    except RayTaskError as error:
        raise user_error(error) from error
    except DEATHS as error:
        raise WorkerDiedError(f"{what}: {name} died ({first_line(error)})") from error


def user_error(error: RayTaskError) -> BaseException:
    """The worker's own exception where it can be had: a ValueError stays one that the command line prints plainly."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, (ValueError, WorkerDiedError)) else error


def first_line(error: BaseException) -> str:
    """The first line that says something."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def get(refs: Sequence[ray.ObjectRef[R]], *, what: str, timeout: float) -> list[R]:
    """`gather` outside a loop, for start and shutdown."""
    try:
        return ray.get(list(refs), timeout=wait_seconds(timeout))
    except RayTaskError as error:
        raise user_error(error) from error
    except GetTimeoutError as error:
        raise WorkerDiedError(f"{what}: no answer within {timeout:.0f} s") from error
    except DEATHS as error:
        raise WorkerDiedError(f"{what}: {first_line(error)}") from error
