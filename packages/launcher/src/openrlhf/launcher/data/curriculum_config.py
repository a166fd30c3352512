"""How prompts are chosen: part of `--data.*`. Imports nothing, as `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """How prompts are chosen by how often their samples pass."""

    curriculum: Literal["uniform", "window", "prioritised"] = "uniform"
    """Which prompts are drawn. uniform: every one once per episode. window: those whose estimated pass rate lies in
    data.curriculum_window. prioritised: the more often the nearer that rate is to one half."""
    curriculum_window: tuple[float, float] = (0.05, 0.95)
    """window: pass rates (low, high), both inclusive."""
    curriculum_uniform: float = 0.1
    """Share of the prompts that is drawn in the uniform order all the same, so that none is forgotten."""
    curriculum_pass: float = 0.5
    """An episode passed whose score (as dynamic filtering sees it) is at least this."""
    curriculum_half_life: float = 20.0
    """Rollout batches after which a try counts half: the policy changes, and old results with it."""
    curriculum_export: str | None = None
    """File in which every prompt's tries, passes and estimate are written at the end of the run: JSON lines, or Parquet
    where it ends in .parquet. None: none."""
