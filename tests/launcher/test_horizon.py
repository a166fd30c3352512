"""How many steps a run makes."""

from __future__ import annotations

import pytest

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.horizon import optimizer_step_horizon, rollout_step_horizon

SIZES = {"rollout.batch_size": 16, "rollout.n_samples_per_prompt": 8, "train.batch_size": 64}


@pytest.mark.parametrize(
    ("prompts", "flags", "rollout_steps", "optimizer_steps"),
    [
        (640, {}, 40, 80),
        (641, {"train.num_episodes": 2}, 82, 162),
        (640, {"train.max_epochs": 3}, 40, 240),
        (640, {"train.max_steps": 7}, 4, 7),  # two optimiser steps each
        (640, {"train.max_steps": 7, "train.max_epochs": 3}, 2, 7),
        (32, {"train.max_steps": 1000}, 2, 1000),
        (3, {}, 1, 1),
    ],
)
def test_l17_steps_of_a_run(prompts: int, flags: dict[str, int], rollout_steps: int, optimizer_steps: int) -> None:
    config = build(TrainPPOConfig(), SIZES | flags)
    assert rollout_step_horizon(config.rollout, config.train, prompts) == rollout_steps
    assert optimizer_step_horizon(config.rollout, config.train, prompts) == optimizer_steps
