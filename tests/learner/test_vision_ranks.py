"""Images on real ranks: rows, micro-batches and whole ranks without any take part in one exact step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.learner_ranks import RankResults, result
from support.learner_vision_cases import FAMILIES, IMAGES, RUNS

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

RANK_CASES = {1: ["images_one_by_one"], 2: ["images_mixed"]}
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
EACH_RUN = pytest.mark.parametrize(("family", "layout"), RUNS)


def one_by_one(ranks: RankResults, family: str, layout: str) -> dict[str, Any]:
    return result(ranks, "images_one_by_one", 1)[0][family, "frozen" if "frozen" in layout else "trained"]


@EACH_RUN
def test_gradients_equal_those_of_one_rank_one_by_one(ranks: RankResults, family: str, layout: str) -> None:
    want = one_by_one(ranks, family, layout)
    for outcome in (of_rank[family, layout] for of_rank in result(ranks, "images_mixed", 2)):
        assert outcome["gradients"].keys() == want["gradients"].keys()
        for name, gradient in want["gradients"].items():
            assert float((outcome["gradients"][name] - gradient).abs().max()) < 1e-6, name
        for name, (total, count) in want["metrics"].items():
            assert outcome["metrics"][name] == pytest.approx((total, count), rel=1e-5, abs=1e-6), name


@EACH_FAMILY
def test_the_encoder_has_gradients_unless_frozen(ranks: RankResults, family: str) -> None:
    trained, frozen = (one_by_one(ranks, family, name)["gradients"] for name in ("trained", "frozen"))
    visual = [name for name in trained if "vis" in name or "projector" in name]
    assert visual
    assert max(float(trained[name].abs().max()) for name in visual) > 1e-4
    assert frozen.keys() == trained.keys() - set(visual)


@EACH_RUN
def test_scores_equal_those_of_one_rank_one_by_one(ranks: RankResults, family: str, layout: str) -> None:
    want = one_by_one(ranks, family, layout)["scores"]
    got: dict[int, Tensor] = {}
    for outcome in result(ranks, "images_mixed", 2):
        got |= outcome[family, layout]["scores"]
    assert sorted(got) == list(range(len(IMAGES)))
    for row, scores in got.items():
        torch.testing.assert_close(scores, want[row, : len(scores)], rtol=0, atol=1e-5)
