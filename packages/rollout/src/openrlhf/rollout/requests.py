"""A generation request on its way from router to engine, what can come back, and the checks at that border."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.engine import FINISH_REASONS, EngineError, Generation, RequestRefusedError, SamplingParams

FAULTS = {
    "error": "it failed inside the engine",
    "repetition": "the engine found that its text repeats itself",
}
"""vLLM's other finish reasons: what was sampled until then is no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One sample to be generated. request_id names it in every message; group_id is its prompt group.

    images: contents of image files, one for each placeholder among the tokens.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    images: Sequence[bytes] | None = None
    group_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFailure:
    """A request that an engine could not serve. engine_fault: the engine is to blame, another one may serve it."""

    request_id: str
    message: str
    engine_fault: bool


class EngineDownError(EngineError):
    """The engine is dead, silent or holds no valid weights; another one may serve the request."""


class RequestRejectedError(RequestRefusedError):
    """This request fails and no other: too long, invalid, an invalid answer, or none."""


def raise_failure(failure: RequestFailure) -> None:
    """Turn a failure that crossed a process border back into its exception."""
    raise (EngineDownError if failure.engine_fault else RequestRejectedError)(failure.message)


def result_of(request_id: str, task: asyncio.Future[Generation]) -> Generation | RequestFailure:
    """What became of a request whose task is done: every exception is a failure."""
    if task.cancelled():
        return RequestFailure(request_id=request_id, message=f"request {request_id} was cancelled", engine_fault=False)
    error = task.exception()
    if error is None:
        return task.result()
    message = str(error) if isinstance(error, EngineError) else f"request {request_id} failed: {error!r}"
    return RequestFailure(request_id=request_id, message=message, engine_fault=isinstance(error, EngineDownError))


def plain_ids(request_id: str, engine: str, token_ids: Sequence[Any]) -> list[int]:
    """Token ids as Python's int: arrays and tensors hold integers that cannot travel to the engine's core.

    Raises RequestRejectedError for anything that is no integer.
    """
    ids: list[int] = []
    for token in token_ids:
        try:
            ids.append(operator.index(token))
        except TypeError as error:
            raise RequestRejectedError(
                f"{engine} rejected request {request_id}: token id {len(ids)} is no integer: {token!r}"
            ) from error
    return ids


def check_finish_reason(request_id: str, engine: str, reason: str) -> None:
    """Raises RequestRejectedError, which names the reason, unless the sample ended as samples do."""
    if reason not in FINISH_REASONS:
        why = FAULTS.get(reason, "which is not known here")
        raise RequestRejectedError(f"{engine} ended request {request_id} with finish_reason {reason!r}: {why}")


def check_logprobs(request_id: str, engine: str, token_ids: Sequence[int], logprobs: Sequence[float | None]) -> None:
    """Raises RequestRejectedError unless there is one finite log-probability, at most 0, per token.

    A NaN that became JSON null arrives as None; a missing one would silently train as a ratio of 1.
    """
    if len(logprobs) != len(token_ids):
        raise RequestRejectedError(
            f"{engine}: request {request_id} returned {len(token_ids)} tokens but {len(logprobs)} log-probs"
        )
    for position, value in enumerate(logprobs):
        # A little above 0 is rounding of log(1).
        if value is None or not math.isfinite(value) or value > 1e-3:
            raise RequestRejectedError(f"{engine}: logprob {position} of request {request_id} invalid: {value!r}")
