from __future__ import annotations

import pytest

from openrlhf.agents.engine import EngineError
from openrlhf.rollout.requests import (
    EngineDownError,
    RequestFailure,
    RequestRejectedError,
    check_logprobs,
    raise_failure,
)


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf"), 0.5])
def test_an_invalid_logprob_is_found_at_the_border(bad: float | None) -> None:  # B065
    with pytest.raises(RequestRejectedError, match="engine-0: logprob 1 of request p3-2 invalid"):
        check_logprobs("p3-2", "engine-0", [4, 5, 6], [-0.1, bad, -0.2])


def test_one_logprob_per_token() -> None:
    check_logprobs("r", "engine-0", [1, 2], [-0.1, 0.0])
    with pytest.raises(RequestRejectedError, match="2 tokens but 1 log-probs"):
        check_logprobs("r", "engine-0", [1, 2], [-0.1])


@pytest.mark.parametrize(("engine_fault", "kind"), [(True, EngineDownError), (False, RequestRejectedError)])
def test_failures_come_back_as_their_exception(engine_fault: bool, kind: type[EngineError]) -> None:
    with pytest.raises(kind, match="because"):
        raise_failure(RequestFailure(request_id="r", message="because", engine_fault=engine_fault))
