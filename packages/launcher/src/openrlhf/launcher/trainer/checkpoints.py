"""Checkpoints of a run: `{ckpt.path}/global_step{N}/{actor,critic,state}`, complete or absent, resumed bit for bit.

The learner ranks write their own parts; here is the trainer's part and the order of things.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.launcher.config import CkptConfig
from openrlhf.launcher.plugins import warn_of_changes
from openrlhf.launcher.saved import STATE_FILE
from openrlhf.launcher.trainer.protocols import Learner, Rollout
from openrlhf.launcher.trainer.untrained import Untrained, read_untrained, write_untrained
from openrlhf.learner.checkpoint_dir import CheckpointStore

log = logging.getLogger(__name__)

GIB = float(1 << 30)


class Checkpoints:
    """When to save, what to keep, where to go on.

    config_toml: the resolved configuration, saved beside every checkpoint. sources: flag -> the file of the user's that
    was given by it.
    """

    def __init__(
        self,
        config: CkptConfig,
        rollout: Rollout,
        learner: Learner,
        *,
        config_toml: str = "",
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._rollout = rollout
        self._learner = learner
        self._config_toml = config_toml
        self._sources = dict(sources or {})
        self._store = CheckpointStore(
            Path(config.path).expanduser(), max_num=config.max_num, max_bytes=config.max_mem * GIB
        )

    @property
    def enabled(self) -> bool:
        return self._config.save_steps > 0

    def due(self, step: int, metric: float | None) -> bool:
        """Whether --ckpt.save_steps asks for one at this step, or its evaluation was the best so far."""
        return self.enabled and (step % self._config.save_steps == 0 or self._is_best(metric))

    async def save(
        self, step: int, state: Mapping[str, Any], untrained: Untrained, *, metric: float | None = None
    ) -> None:
        """Write a checkpoint, and its Hugging Face export with --ckpt.save_hf.

        state, untrained: the trainer's, of one moment: sampling goes on while the ranks write.
        """
        if not self._config.disable_ds:
            pending = self._store.begin(step)
            await self._learner.save(str(pending))
            folder = pending / "state"
            folder.mkdir()
            (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n")
            await write_untrained(untrained, self._rollout, folder)
            (folder / "config.toml").write_text(self._config_toml)
            for flag, source in self._sources.items():
                (folder / f"{flag}.py").write_text(source, encoding="utf-8")
            path = self._store.commit(step, metric=metric)
            log.info("checkpoint %s", path)
        if self._config.save_hf:
            await self._learner.export(str(self._store.root / f"global_step{step}_hf"))

    def newest(self) -> Path | None:
        """The checkpoint to go on from: with --ckpt.load_enable the newest complete one, if there is one."""
        if not self._config.load_enable:
            return None
        for leftover in self._store.unfinished():
            log.warning("skipped the unfinished checkpoint %s", leftover)
        newest = self._store.latest()
        if newest is None:
            log.warning("--ckpt.load_enable: no checkpoint in %s, the run starts anew", self._store.root)
            return None
        return newest.path

    async def read(self, checkpoint: Path) -> tuple[dict[str, Any], Untrained]:
        """The trainer's part of a checkpoint."""
        folder = checkpoint / "state"
        warn_of_changes(folder, self._sources)
        return json.loads((folder / STATE_FILE).read_text()), await read_untrained(self._rollout, folder)

    def metric_of(self, evaluation: Mapping[str, float]) -> float | None:
        """The value of --ckpt.best_metric_key in an evaluation; None where it is not finite or not asked for.

        Raises ValueError when the evaluation has no metric of that name.
        """
        key = self._config.best_metric_key
        if not evaluation or key == "none":
            return None
        value = find_metric(evaluation, key)
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
