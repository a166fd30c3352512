"""All of 1, 2, 4 trainer ranks x ZeRO 0 to 3 x tied and untied x every transport, before and after steps."""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.timeout(3500)]

ALL = [
    f"trained-{backend}-{stage}-{model}"
    for backend in ("nccl", "ipc", "gloo", "shared")
    for stage in range(4)
    for model in ("qwen3", "untied")
]
ADAPTERS = [f"adapter-{backend}-{stage}" for backend in ("nccl", "ipc", "gloo", "shared") for stage in range(4)]
RANK_CASES = {world: [*ALL, *ADAPTERS] for world in (1, 2, 4)}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", [*ALL, *ADAPTERS])
def test_engines_load_what_the_trainer_holds(ranks: RankResults, world: int, case: str) -> None:
    assert [outcome["different"] for outcome in result(ranks, case, world)] == [[]] * world
