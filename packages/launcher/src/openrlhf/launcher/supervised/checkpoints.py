"""Checkpoints of a supervised run: `{ckpt.path}/global_step{N}/{model,state}`, complete or absent."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf.launcher.saved import RUN, STATE_FILE
from openrlhf.launcher.supervised.process import is_first
from openrlhf.launcher.supervised_config import SupervisedCkptConfig
from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.learner import Learner

log = logging.getLogger(__name__)

GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands. step: optimiser steps taken; position: units of the present epoch that were trained on."""

    step: int = 0
    epoch: int = 0
    position: int = 0


class SupervisedCheckpoints:
    """When to save and where to go on. Methods are collective; rank 0 makes and names the folders.

    run_id: the run's name for loggers. fingerprint: what the data position depends on; a checkpoint with another one is
    refused.
    """

    def __init__(
        self,
        config: SupervisedCkptConfig,
        learner: Learner,
        tokenizer: Any,
        *,
        config_toml: str,
        run_id: str,
        fingerprint: dict[str, Any],
    ) -> None:
        self._config = config
        self._learner = learner
        self._tokenizer = tokenizer
        self._config_toml = config_toml
        self._run_id = run_id
        self._fingerprint = fingerprint
        self._store = CheckpointStore(
            Path(config.path).expanduser(), max_num=config.max_num, max_bytes=config.max_mem * GIB
        )

    def due(self, step: int) -> bool:
        """Whether `--ckpt.save_steps` asks for one after this step."""
        return self._config.save_steps > 0 and step % self._config.save_steps == 0

    def save(self, progress: Progress, metric: float | None) -> None:
        """Write a checkpoint, and the Hugging Face export with `--ckpt.save_hf`. metric: higher is better."""
        collective = self._learner.collective
        if not self._config.disable_ds:
            pending = self._store.pending(progress.step)
            if is_first():
                self._store.begin(progress.step)
            collective.barrier()
            self._learner.save_checkpoint(str(pending / "model"))
            collective.barrier()
            if is_first():
                self._write_state(pending / "state", progress)
                log.info("checkpoint %s", self._store.commit(progress.step, metric=metric))
            collective.barrier()
        if self._config.save_hf:
            self._learner.export_hf(str(self._store.root / f"global_step{progress.step}_hf"), self._tokenizer)

    def restore(self) -> Progress:
        """Go on from the newest checkpoint if `--ckpt.load_enable` and there is one; else from the start."""
        if not self._config.load_enable:
            return Progress()
        newest = self._store.latest()
        if newest is None:
            log.warning("--ckpt.load_enable: no checkpoint in %s, the run starts anew", self._store.root)
            return Progress()
        state = json.loads((newest.path / "state" / STATE_FILE).read_text())
        for name, flag in (("units", "--data.dataset"), ("seed", "--train.seed"), ("batch_size", "--train.batch_size")):
            if state["fingerprint"][name] != self._fingerprint[name]:
                raise ValueError(
                    f"the checkpoint {str(newest.path)!r} was written with {name} {state['fingerprint'][name]!r} "
                    f"({flag}), this run has {self._fingerprint[name]!r}"
                )
        self._learner.load_checkpoint(str(newest.path / "model"))
        log.info("resumed from %s", newest.path)
        return Progress(**state["progress"])

    def _write_state(self, folder: Path, progress: Progress) -> None:
        folder.mkdir()
        state = {"progress": asdict(progress), "fingerprint": self._fingerprint, RUN: self._run_id}
        (folder / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n")
        (folder / "config.toml").write_text(self._config_toml)
