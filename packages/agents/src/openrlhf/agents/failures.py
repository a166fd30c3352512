"""Turns exceptions of one sample into data; reports each kind, and says each warning, once per process."""

from __future__ import annotations

import asyncio
import logging
import traceback as tracebacks
from typing import Any

from openrlhf.agents.engine import EngineError
from openrlhf.agents.recorder import Recorder, failed_trajectory
from openrlhf.agents.types import Failure, PromptItem, StopReason, Trajectory

logger = logging.getLogger(__name__)
_said: set[str] = set()
REMEMBERED_REPORTS = 1000  # distinct failure messages that are kept to report each only once


def warn_once(logger: logging.Logger, about: str, message: str, *values: Any) -> None:
    """Logs `message % values` unless something was said about `about` before."""
    if about not in _said:
        _said.add(about)
        logger.warning(message, *values)


class EpisodeFailed(Exception):  # noqa: N818 - a state of an episode, raised inside it only
    """Ends an episode as failed; `recorder` keeps the tokens until then. Chain the cause with `from`."""

    def __init__(
        self,
        border: str,
        message: str,
        *,
        recorder: Recorder | None = None,
        stop_reason: StopReason = StopReason.FAILED,
    ) -> None:
        super().__init__(message)
        self.border = border
        self.recorder = recorder
        self.stop_reason = stop_reason


def failure_of(error: BaseException, border: str = "agent") -> Failure:
    """What `error` says, with the traceback of its first cause."""
    if isinstance(error, EpisodeFailed):
        border = error.border
    elif isinstance(error, EngineError):
        border = "engine"
    cause = error.__cause__ if isinstance(error, EpisodeFailed) and error.__cause__ else error
    text = str(error) if isinstance(error, EpisodeFailed) else describe(error)
    return Failure(border=border, message=text, traceback="".join(tracebacks.format_exception(cause)))


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def trajectory_of(error: BaseException, item: PromptItem, sample_index: int) -> Trajectory:
    """The failed sample of an exception that left an episode."""
    episode = error if isinstance(error, EpisodeFailed) else None
    return failed_trajectory(
        item,
        sample_index,
        failure_of(error),
        recorder=episode.recorder if episode else None,
        stop_reason=episode.stop_reason if episode else StopReason.FAILED,
    )


class FailureLog:
    """Writes every distinct failure once, with its traceback; repeats are left to the counters."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def report(self, trajectory: Trajectory) -> None:
        failure = trajectory.failure
        if failure is None or (failure.border, failure.message) in self._seen:
            return
        if len(self._seen) < REMEMBERED_REPORTS:
            self._seen.add((failure.border, failure.message))
        detail = (
            failure.traceback if failure.message in failure.traceback else f"{failure.message}\n{failure.traceback}"
        )
        logger.warning(
            "sample %d of %s failed (%s): %s",
            trajectory.sample_index,
            trajectory.group_id,
            failure.border,
            detail.rstrip(),
        )


def swallow(task: asyncio.Task) -> None:
    """Done-callback of an abandoned task: its late exception is nobody's business."""
    if not task.cancelled():
        task.exception()
