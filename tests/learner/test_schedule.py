"""Schedules by Hugging Face name."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from openrlhf.learner.config import SCHEDULES, AdamConfig, OptimConfig
from openrlhf.learner.schedule import build_schedule, warmup_steps
from openrlhf.learner.zero.optim import build_optimizer


def rates(name: str, steps: int, *, warmup: float = 0.0, min_ratio: float = 0.1, base: float = 1.0) -> list[float]:
    """Rate of every update 0..steps-1, and after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    schedule = build_schedule(
        optimizer, OptimConfig(lr_scheduler=name, lr_warmup_ratio=warmup, min_lr_ratio=min_ratio), steps
    )
    seen = [float(schedule.get_last_lr()[0])]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        seen.append(float(schedule.get_last_lr()[0]))
    return seen


class TinyModule(nn.Module):
    """What `build_optimizer` looks at: a hidden matrix and an embedding."""

    head = None

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "layer": nn.Linear(4, 4)})
        self.model.get_output_embeddings = lambda: None  # type: ignore[assignment]


def test_linear_decay_is_half_after_half_of_the_optimiser_steps() -> None:
    # B125: 3 rollouts x 2 epochs x 4 mini-batches = 24 optimiser steps
    assert rates("linear", 3 * 2 * 4)[12] == pytest.approx(0.5)


def test_cosine_reaches_its_minimum_after_the_last_update_and_only_falls() -> None:
    # B110: 10 samples, 4 per step, 3 epochs: 7 whole updates
    steps = 10 * 3 // 4
    seen = rates("cosine_with_min_lr", steps, warmup=0.2, min_ratio=0.25)
    assert steps == 7
    assert seen[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert seen[-1] == pytest.approx(0.25)
    after = seen[warmup_steps(steps, 0.2) :]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_works_and_warms_up(name: str) -> None:
    # the minimum ratio is only handed to the schedules that know it
    seen = rates(name, 10, warmup=0.2, base=2.0)
    assert len(seen) == 11
    assert max(seen) == pytest.approx(2.0)
    assert all(rate >= 0 for rate in seen)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("steps", range(1, 7))
def test_n16_every_short_run_has_rates_and_trains(name: str, warmup: float, steps: int) -> None:
    seen = rates(name, steps, warmup=warmup)
    assert all(math.isfinite(rate) and 0 <= rate <= 1 for rate in seen)
    assert max(seen[:steps]) > 0  # the rates of the updates; one more is set after the last


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("config", [OptimConfig(optim="muon"), OptimConfig(adam=AdamConfig(lr=1e-7))])
def test_n16_every_name_works_with_every_optimiser_and_low_rates(
    name: str, config: OptimConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "openrlhf.learner.zero.optim")
    optimizer = build_optimizer(TinyModule(), config)  # type: ignore[arg-type]
    said = "muon updates 1 matrices, AdamW the other 2 parameters"  # B122
    assert (said in caplog.text) is (config.optim == "muon")
    base = [float(group["lr"]) for group in optimizer.param_groups]
    schedule = build_schedule(optimizer, replace(config, lr_scheduler=name, lr_warmup_ratio=0.0), 3)
    assert all(0 < rate <= most for rate, most in zip(schedule.get_last_lr(), base, strict=True))


def test_n16_polynomial_decay_is_straight_between_warm_up_and_end() -> None:
    assert rates("polynomial", 5, warmup=0.2) == pytest.approx([0.0, 1.0, 0.75, 0.5, 0.25, 1e-7])
    assert rates("polynomial", 1, warmup=0.03) == pytest.approx([1.0, 1e-7])


def test_warmup_is_rounded_up_and_leaves_one_update() -> None:
    assert warmup_steps(40, 0.03) == 2
    assert warmup_steps(40, 0.0) == 0
    assert warmup_steps(1, 0.03) == 0
    assert warmup_steps(6, 1.0) == 5


def test_groups_keep_their_own_base_rate() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.02, 1e-3)]
    optimizer = torch.optim.SGD(groups)
    schedule = build_schedule(optimizer, OptimConfig(lr_scheduler="linear", lr_warmup_ratio=0.0), 4)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.015, 0.00075])


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"reduce_lr_on_plateau.*use one of linear, cosine"):
        rates("reduce_lr_on_plateau", 3)
