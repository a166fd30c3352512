"""The whole table: {adam, muon} x ZeRO {0, 1, 2, 3} x {policy, critic}, resumed bit for bit."""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {2: ["resume_all"]}


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optim", ["adam", "muon"])
def test_resumed_run_equals_the_uninterrupted_one(ranks: RankResults, optim: str, stage: int, role: str) -> None:
    for of_rank in result(ranks, "resume_all", 2):
        outcome = of_rank[f"{optim}-{stage}-{role}"]
        assert outcome["metrics"]
        assert outcome["weights"]
        assert outcome["ema"]
