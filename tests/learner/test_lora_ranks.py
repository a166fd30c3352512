"""Adapters on one and two ranks: the base is the reference, gradients, resuming."""

from __future__ import annotations

import pytest

from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {2: ["lora_reference", "lora_checkpointing", "lora_resume"], 1: ["lora_reference"]}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sharing", ["off", "on"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_base_is_a_reference_that_never_moves(ranks: RankResults, world: int, stage: int, sharing: str) -> None:
    for of_rank in result(ranks, "lora_reference", world):
        outcome = of_rank[f"{stage}-{sharing}"]
        assert len(outcome["apart"]) == 4
        assert max(outcome["apart"]) <= 1e-6
        assert outcome["moved"] > 1e-2


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_alone_are_trained_all_of_them_and_nothing_decays(ranks: RankResults, stage: int) -> None:
    for of_rank in result(ranks, "lora_reference", 2):
        outcome = of_rank[f"{stage}-off"]
        assert outcome["changed"] == outcome["adapters"]
        assert len(outcome["adapters"]) == 2 * 7 * 2


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_leaves_no_adapter_untrained(ranks: RankResults, stage: int, kind: str) -> None:
    for of_rank in result(ranks, "lora_checkpointing", 2):
        want, got = of_rank[f"{stage}-none"], of_rank[f"{stage}-{kind}"]
        assert got.keys() == want.keys()
        assert len(want) == 2 * 7 * 2
        for name, gradient in want.items():
            assert float(gradient.abs().max()) > 0, name
            assert float((got[name] - gradient).abs().max()) <= 1e-6, name


@pytest.mark.parametrize("case", ["0-critic", "2-policy", "3-policy", "3-critic"])
def test_a_resumed_run_with_adapters_goes_on_bit_for_bit(ranks: RankResults, case: str) -> None:
    for outcome in (of_rank[case] for of_rank in result(ranks, "lora_resume", 2)):
        assert outcome["metrics"]
        assert outcome["weights"]
        assert outcome["ema"]
        assert outcome["steps"] == 4
