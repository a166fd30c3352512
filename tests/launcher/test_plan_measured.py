"""The plan's parameters, gradients and optimiser states against what real learner ranks hold, on the quickstart."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from openrlhf.launcher.plan.memory import gradient_bytes, optimizer_bytes, parameter_bytes, persistent_bytes
from openrlhf.launcher.plan.shape import read_shape
from support.launcher_memory_cases import LORA, STAGES
from support.learner_ranks import RankResults, result
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

WORLD = 2
LAUNCHER_CASES = {WORLD: ["held_memory", "held_with_adapters"]}


@pytest.mark.parametrize("moment", ["training", "optimizer_step"])
@pytest.mark.parametrize("stage", STAGES)
def test_prediction_is_within_a_tenth(launcher_ranks: RankResults, stage: int, moment: str, tmp_path: Path) -> None:
    shape = read_shape(tiny_qwen3(tmp_path))
    gradients = partial(gradient_bytes, stepping=moment == "optimizer_step")
    functions = (parameter_bytes, gradients, optimizer_bytes)
    predicted = sum(f(shape.parameters, stage=stage, itemsize=4, world=WORLD) for f in functions)
    if moment == "training":
        predicted += persistent_bytes(shape, stage=stage, itemsize=4)
    held = [of_rank[stage][moment] for of_rank in result(launcher_ranks, "held_memory", WORLD)]
    print(f"stage {stage}, {moment}: {predicted:,} bytes predicted, {held} measured")
    assert held == pytest.approx([predicted] * WORLD, rel=0.1)


@pytest.mark.parametrize("moment", ["training", "optimizer_step"])
@pytest.mark.parametrize("stage", STAGES)
def test_with_adapters_too(launcher_ranks: RankResults, stage: int, moment: str, tmp_path: Path) -> None:
    shape = read_shape(tiny_qwen3(tmp_path))
    adapters = shape.adapter_parameters(LORA)
    gradients = partial(gradient_bytes, stepping=moment == "optimizer_step")
    trained = sum(
        f(adapters, stage=stage, itemsize=4, world=WORLD) for f in (parameter_bytes, gradients, optimizer_bytes)
    )
    predicted = trained + parameter_bytes(shape.parameters, stage=stage, itemsize=4, world=WORLD)
    small = persistent_bytes(shape, stage=stage, itemsize=4) + (adapters * 4 if stage == 3 else 0)
    held = [of_rank[stage][moment] for of_rank in result(launcher_ranks, "held_with_adapters", WORLD)]
    predicted += small if moment == "training" else 0
    print(f"stage {stage}, {moment}: {predicted:,} bytes predicted, {held} measured")
    assert held == pytest.approx([predicted] * WORLD, rel=0.1)
