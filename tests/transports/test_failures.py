"""A push that fails on one side in the middle is noticed in time, and a new group brings everything again."""

from __future__ import annotations

import re

import pytest

from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

FAILURES = [
    (backend, fault)
    for backend in ("gloo", "shared", "nccl", "ipc")
    for fault in ("engine-fails", "trainer-fails", "engine-silent")
    if fault != "engine-silent" or backend in ("nccl", "ipc")  # the others: tests/rollout/test_weight_group, _shared
]
RANK_CASES = {
    2: ["failures-gloo", "failures-shared", "failures-nccl", "failures-ipc", "silent_trainer", "lost_in_meeting"]
}


@pytest.mark.parametrize(("backend", "fault"), FAILURES)
def test_everything_again_after_a_failure(ranks: RankResults, backend: str, fault: str) -> None:
    first, *others = [outcome[fault] for outcome in result(ranks, f"failures-{backend}", 2)]
    assert re.search(first["wanted"], first["said"])
    assert first["different"] == []
    for other in others:  # they stay in step; a stream that breaks the plan is seen by each rank that sends
        assert other["said"] == "" or fault == "trainer-fails"


def test_engines_give_up_a_trainer_that_never_sends(ranks: RankResults) -> None:
    outcome = result(ranks, "silent_trainer", 2)[0]
    assert "the other side did not answer within 3 s" in outcome["said"]
    assert outcome["different"] == ""


def test_a_meeting_without_an_engine_ends(ranks: RankResults) -> None:
    outcome = result(ranks, "lost_in_meeting", 2)[0]
    assert "could not meet the engines within 3 s" in outcome["said"]
    assert outcome["different"] == ""
