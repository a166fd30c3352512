"""The moving average of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.learner_ranks import RankResults, result

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {2: ["averages"]}


@pytest.mark.parametrize("stage", [1, 3])
def test_average_follows_the_formula(ranks: RankResults, stage: int) -> None:
    first, second = (of_rank[f"stage{stage}"] for of_rank in result(ranks, "averages", 2))
    want = first["history"][0]
    for weights in first["history"][1:]:
        want = {name: 0.75 * want[name] + 0.25 * weights[name] for name in want}
    assert first["ema"].keys() == want.keys()
    assert all(torch.allclose(first["ema"][name], want[name], atol=1e-6) for name in want)
    assert not torch.equal(first["ema"]["model.norm.weight"], first["history"][-1]["model.norm.weight"])
    assert second["ema"] is None


@pytest.mark.parametrize("stage", [1, 3])
def test_average_is_exported_beside_the_live_weights(ranks: RankResults, rank_folder: Path, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    outcome = result(ranks, "averages", 2)[0][f"stage{stage}"]
    for folder, want in (("", outcome["history"][-1]), ("ema", outcome["ema"])):
        model = AutoModelForCausalLM.from_pretrained(rank_folder / f"ema-export-{stage}" / folder)
        assert all(torch.equal(p, want[name]) for name, p in model.named_parameters())
