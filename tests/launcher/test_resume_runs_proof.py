"""The whole table: {adam, muon} x ZeRO {0, 1, 2, 3} x {with critic, without}, interrupted in three places."""

from __future__ import annotations

import pytest

from support.launcher_resume_cases import check_resumed
from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(3600)]

LAUNCHER_CASES = {1: ["run_all_resumes"]}


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optim", ["adam", "muon"])
def test_every_resumed_run(launcher_ranks: RankResults, optim: str, stage: int, critic: bool) -> None:
    check_resumed(result(launcher_ranks, "run_all_resumes", 1)[0][f"{optim}-{stage}-{critic}"])
