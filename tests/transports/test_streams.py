"""No tensor of an nccl push crosses CUDA streams: not the trainer's, not those that engines keep between messages."""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

RANK_CASES = {1: ["streams-1", "streams-2"]}


def test_one_stream_keeps_everything_in_order(ranks: RankResults) -> None:
    outcome = result(ranks, "streams-1", 1)[0]
    assert outcome == {"sent": [], "received": [], "different": []}


def test_two_streams_would_not(ranks: RankResults) -> None:
    outcome = result(ranks, "streams-2", 1)[0]
    assert any("free again" in fault for fault in outcome["sent"])
    assert any("free again" in fault for fault in outcome["received"])
    assert any("copy_" in fault for fault in outcome["received"])
