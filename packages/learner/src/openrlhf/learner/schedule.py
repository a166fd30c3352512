"""Learning-rate schedules by their Hugging Face name."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from openrlhf.learner.config import SCHEDULES, OptimConfig

WITH_MIN_LR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
POLYNOMIAL_END = 1e-7


def warmup_steps(total: int, ratio: float) -> int:
    """Warm-up steps: the ratio's share, rounded up. One update is left behind them, or nothing would be trained."""
    return min(math.ceil(total * ratio), total - 1)


def polynomial_end(optimizer: Optimizer) -> float:
    """Where the polynomial decay ends: transformers' 1e-7, or a tenth of a base rate that is not far above it.

    transformers takes the base rate from the optimiser's defaults; Muon has none, only groups.
    """
    base = float(optimizer.defaults.setdefault("lr", optimizer.param_groups[0]["lr"]))
    return min(POLYNOMIAL_END, 0.1 * base)


def build_schedule(optimizer: Optimizer, config: OptimConfig, total_steps: int) -> LRScheduler:
    """The schedule over `total_steps` optimiser steps. Every parameter group keeps its own base rate.

    As in transformers, update k (from 0) runs at the rate of step k: the first one of a warm-up has rate 0, and the
    minimum is reached after the last update.
    """
    if config.lr_scheduler not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ValueError(f"`optim.lr_scheduler` {config.lr_scheduler!r} is not supported: use one of {known}")
    from transformers import get_scheduler

    specific: dict[str, Any] | None = None
    if config.lr_scheduler in WITH_MIN_LR:
        specific = {"min_lr_rate": config.min_lr_ratio}
    elif config.lr_scheduler == "polynomial":
        specific = {"lr_end": polynomial_end(optimizer)}
    return get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=warmup_steps(total_steps, config.lr_warmup_ratio),
        num_training_steps=total_steps,
        scheduler_specific_kwargs=specific,
    )
