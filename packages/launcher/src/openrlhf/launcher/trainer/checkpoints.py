"""Checkpoints of a run: `{ckpt.path}/global_step{N}/{actor,critic,state}`, complete or absent, resumed bit for bit.

The learner ranks write their own parts; here is the trainer's part and the order of things.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.launcher.config import CkptConfig
from openrlhf.launcher.plugins import warn_of_changes
from openrlhf.launcher.saved import STATE_FILE
from openrlhf.launcher.trainer.protocols import Learner, Rollout
from openrlhf.launcher.trainer.untrained import Untrained, read_untrained, write_untrained
from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.folders.shared import host, mark, named

log = logging.getLogger(__name__)

GIB = float(1 << 30)
FULL_BYTES = 1 << 20
"""A file system with less room is full: a write that failed leaves a part of a block."""


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
        Raises ValueError where the disk is full: what a rank's writer raises then often says nothing of it.
        """
        try:
            await self._save(step, state, untrained, metric)
        except Exception as error:
            if shutil.disk_usage(self._store.root).free >= FULL_BYTES:
                raise
            raise ValueError(
                f"--ckpt.path {str(self._store.root)!r}: No space left on device, the checkpoint of step {step} is not "
                f"written ({type(error).__name__}); make room and go on with --ckpt.load_enable"
            ) from error

    async def _save(self, step: int, state: Mapping[str, Any], untrained: Untrained, metric: float | None) -> None:
        if not self._config.disable_ds:
            pending = self._store.begin(step)
            written = await self._learner.save(str(pending))
            folder = pending / "state"
            folder.mkdir()
            (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n")
            await write_untrained(untrained, self._rollout, folder)
            (folder / "config.toml").write_text(self._config_toml)
            for flag, source in self._sources.items():
                (folder / f"{flag}.py").write_text(source, encoding="utf-8")
            path = self._store.commit(step, metric=metric, written=written)
            log.info("checkpoint %s", path)
        if self._config.save_hf:
            await self._learner.export(str(self._store.root / f"global_step{step}_hf"))

    async def check_shared(self) -> None:
        """Whether the ranks that write checkpoints see the folder that this process reads them from.

        Raises ValueError where the run saves any; where it would by a warning of its job alone, that is said.
        """
        if self._config.disable_ds or not self._store.root.is_dir():  # a run holds its folders, so they are there
            return
        with mark(self._store.root) as name:
            blind = await self._learner.blind_to(str(self._store.root / name))
        if not blind:
            return
        message = (
            f"--ckpt.path {str(self._store.root)!r} is another folder on {named(blind)} than on {host()}, where the "
            "run was started: a checkpoint would be in pieces. Give a folder of a file system that all nodes share"
        )
        if self.enabled or self._config.load_enable:
            raise ValueError(message)
        log.warning("%s; this run could not be saved at a warning", message)

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
