"""Checkpoints of a run: `{ckpt.path}/global_step{N}/{actor,critic,state}`, complete or absent, resumed bit for bit.

The learner ranks write their own parts; here is the trainer's part and the order of things.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.launcher.config import CkptConfig
from openrlhf.launcher.saved import RUN, STATE_FILE
from openrlhf.launcher.trainer.untrained import read_untrained, write_untrained
from openrlhf.learner.checkpoint_dir import CheckpointStore

if TYPE_CHECKING:
    from openrlhf.launcher.trainer.loop import Trainer

log = logging.getLogger(__name__)

GIB = float(1 << 30)


class Checkpoints:
    """When to save, what to keep, where to go on.

    config_toml: the resolved configuration, saved beside every checkpoint.
    """

    def __init__(self, config: CkptConfig, *, config_toml: str = "") -> None:
        self._config = config
        self._config_toml = config_toml
        self._store = CheckpointStore(
            Path(config.path).expanduser(), max_num=config.max_num, max_bytes=config.max_mem * GIB
        )

    @property
    def enabled(self) -> bool:
        return self._config.save_steps > 0

    async def after_step(self, trainer: Trainer) -> None:
        """Save when --ckpt.save_steps says so, or when this step's evaluation was the best so far."""
        if not self.enabled:
            return
        metric = self.metric_of(trainer)
        due = trainer.state.step % self._config.save_steps == 0
        if due or self._is_best(metric):
            await self.save(trainer, metric)

    async def save(self, trainer: Trainer, metric: float | None = None) -> None:
        """Write a checkpoint of the present step, and its Hugging Face export with --ckpt.save_hf."""
        step = trainer.state.step
        if not self._config.disable_ds:
            # both at one moment: sampling goes on while the ranks write
            own, untrained = trainer.state_dict() | {RUN: trainer.parts.sink.run_id}, trainer.pipeline.untrained()
            pending = self._store.begin(step)
            await trainer.parts.learner.save(str(pending))
            state = pending / "state"
            state.mkdir()
            (state / STATE_FILE).write_text(json.dumps(own, indent=1) + "\n")
            await write_untrained(untrained, trainer.parts.rollout, state)
            (state / "config.toml").write_text(self._config_toml)
            path = self._store.commit(step, metric=metric)
            log.info("checkpoint %s", path)
        if self._config.save_hf:
            await trainer.parts.learner.export(str(self._store.root / f"global_step{step}_hf"))

    async def restore(self, trainer: Trainer) -> bool:
        """Go on from the newest checkpoint if --ckpt.load_enable and there is one. True when the run was resumed."""
        if not self._config.load_enable:
            return False
        for leftover in self._store.unfinished():
            log.warning("skipped the unfinished checkpoint %s", leftover)
        newest = self._store.latest()
        if newest is None:
            log.warning("--ckpt.load_enable: no checkpoint in %s, the run starts anew", self._store.root)
            return False
        state = json.loads((newest.path / "state" / STATE_FILE).read_text())
        trainer.load_state_dict(state, await read_untrained(trainer.parts.rollout, newest.path / "state"))
        await trainer.parts.learner.load(str(newest.path))
        log.info("resumed from %s", newest.path)
        return True

    def metric_of(self, trainer: Trainer) -> float | None:
        """The value of --ckpt.best_metric_key in this step's evaluation; None without one.

        Raises ValueError when the evaluation has no metric of that name.
        """
        key = self._config.best_metric_key
        if trainer.evaluated_at != trainer.state.step or key == "none":
            return None
        value = find_metric(trainer.evaluation, key)
        return None if value is None or not math.isfinite(value) else value

    def _is_best(self, metric: float | None) -> bool:
        if metric is None:
            return False
        best = self._store.best()
        return best is None or best.metric is None or metric > best.metric


def find_metric(evaluation: Mapping[str, float], key: str) -> float | None:
    """The metric named `key`, with or without "eval/"; for "" the first, sorted, that ends in _pass1."""
    if not key:
        return next((evaluation[name] for name in sorted(evaluation) if name.endswith("_pass1")), None)
    for name in (key, f"eval/{key}"):
        if name in evaluation:
            return evaluation[name]
    raise ValueError(
        f"--ckpt.best_metric_key {key!r}: the evaluation has no such metric; it has {', '.join(sorted(evaluation))}"
    )
