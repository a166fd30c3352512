"""The steps of 2 and 4 ranks that share rows, and of two groups of 2, are those of one rank, in all that is claimed."""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result
from support.learner_sequence_cases import GROUPS_SETUPS, PROOF_SETUPS, Setup, check_same

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]

RANK_CASES = {
    4: ["sequence_proof", "sequence_groups", "sequence_resume"],
    2: ["sequence_proof"],
    1: ["sequence_proof", "sequence_groups"],
}


def check(ranks: RankResults, case: str, setups: dict[str, Setup], name: str, world: int) -> None:
    want = result(ranks, case, 1)[0][str(setups[name].alone)]
    for of_rank in result(ranks, case, world):
        check_same(of_rank[name], want, task=setups[name].task)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PROOF_SETUPS)
def test_models_tasks_and_stages(ranks: RankResults, name: str, world: int) -> None:
    check(ranks, "sequence_proof", PROOF_SETUPS, name, world)


@pytest.mark.parametrize("name", GROUPS_SETUPS)
def test_two_groups_have_samples_of_their_own(ranks: RankResults, name: str) -> None:
    check(ranks, "sequence_groups", GROUPS_SETUPS, name, 4)


def test_four_ranks_resume(ranks: RankResults) -> None:
    for of_rank in result(ranks, "sequence_resume", 4):
        assert of_rank["resumed"]["metrics"]
        assert of_rank["resumed"]["weights"]
        assert of_rank["resumed"]["ema"]
        assert of_rank["difference at size 1"] < 1e-6
