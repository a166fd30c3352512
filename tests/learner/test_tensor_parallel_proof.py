"""Two tensor-parallel groups of two ranks: shards and data parallelism together do the step of one rank."""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result
from support.learner_shard_cases import SHARD_LAYOUTS, check_step

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {4: ["shard_layouts", "shard_resume"], 1: ["layouts"]}


@pytest.mark.parametrize("layout", SHARD_LAYOUTS)
def test_the_step_of_two_groups_is_that_of_one_rank(ranks: RankResults, layout: str) -> None:
    check_step(result(ranks, "shard_layouts", 4), result(ranks, "layouts", 1)[0]["stage0"], layout)


@pytest.mark.parametrize("case", ["0-policy", "2-critic"])
def test_two_groups_resume_bit_for_bit(ranks: RankResults, case: str) -> None:
    for outcome in (of_rank[case] for of_rank in result(ranks, "shard_resume", 4)):
        assert outcome["metrics"]
        assert outcome["weights"]
        assert outcome["ema"]
