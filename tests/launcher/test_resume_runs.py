"""A run of the trainer with real learners that was interrupted goes on as if it never was, bit for bit."""

from __future__ import annotations

import pytest

from support.launcher_resume_cases import check_resumed
from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

LAUNCHER_CASES = {1: ["run_resumes"]}


@pytest.mark.parametrize("case", ["adam-2-True", "muon-3-False", "lora-2-True"])
def test_resumed_run_is_the_uninterrupted_one(launcher_ranks: RankResults, case: str) -> None:
    # B114, B115
    check_resumed(result(launcher_ranks, "run_resumes", 1)[0][case])
