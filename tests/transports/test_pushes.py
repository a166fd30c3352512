"""nccl, CUDA IPC and shared memory: what vLLM's own receivers load is what the trainer holds, bit for bit.

The tests of this folder run against the GPU build of vLLM in `nox -s gpu-set`, and as well against the CPU build.
"""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

# Pairs of backend, stage and model once each; `trained` adds a second push over the connection. An embedding of these
# models is larger than a bucket.
FEW = {
    1: ["push-nccl-1-untied", "push-ipc-0-qwen3"],
    2: [
        "push-nccl-3-qwen3",
        "trained-nccl-0-untied",
        "push-ipc-3-untied",
        "trained-ipc-2-qwen3",
        "trained-shared-3-untied",
    ],
}
ADAPTERS = {1: ["adapter-ipc-0"], 2: ["adapter-nccl-3", "adapter-ipc-2", "adapter-shared-3"]}
RANK_CASES = {world: [*FEW[world], *ADAPTERS[world], *others] for world, others in {1: ["mixed"], 2: []}.items()}


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in FEW.items() for case in cases])
def test_engines_load_what_the_trainer_holds(ranks: RankResults, world: int, case: str) -> None:
    outcomes = result(ranks, case, world)
    assert [outcome["different"] for outcome in outcomes] == [[]] * world
    assert ("lm_head.weight" in outcomes[0]["names"]) is ("untied" in case)
    assert len(outcomes[0]["names"]) > 20


def test_tensors_of_two_dtypes_in_one_message(ranks: RankResults) -> None:
    assert result(ranks, "mixed", 1) == [{"nccl": [], "ipc": []}]


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in ADAPTERS.items() for case in cases])
def test_an_adapter_arrives_beside_the_model_and_then_alone(ranks: RankResults, world: int, case: str) -> None:
    outcomes = result(ranks, case, world)
    assert [outcome["different"] for outcome in outcomes] == [[]] * world
    assert outcomes[0]["moved"]
    whole, adapter = outcomes[0]["bytes"]
    assert adapter < whole / 10
