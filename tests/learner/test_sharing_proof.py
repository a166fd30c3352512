"""Every kind of model, ZeRO stage and layout: a step with shared prompts is the step without, on one and two ranks."""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result
from support.learner_sharing_cases import ARCHITECTURES, LAYOUTS, MORE_LAYOUTS, check_same

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(900)]

RANK_CASES = {2: ["sharing_everywhere"], 1: ["sharing_everywhere"]}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", LAYOUTS | MORE_LAYOUTS)
def test_a_step_is_that_of_whole_samples(ranks: RankResults, arch: str, layout: str, world: int) -> None:
    for outcome in result(ranks, "sharing_everywhere", world):
        whole = outcome[arch]["whole" if layout in ("stage0", "stage0-packed") else "whole without balance"]
        check_same(outcome[arch][layout], whole)
