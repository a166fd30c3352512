"""Checkpoints of a supervised run: `{ckpt.path}/global_step{N}/{model,state}`, complete or absent."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf.launcher.saved import RUN, STATE_FILE
from openrlhf.launcher.supervised.process import is_first
from openrlhf.launcher.supervised_config import SupervisedCkptConfig
from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.folders.shared import host, mark, named, sees, together
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
            seen = collective.everyone(self._learner.save_checkpoint(str(pending / "model")))
            trouble = None
            if is_first():
                self._write_state(pending / "state", progress)
                try:
                    path = self._store.commit(progress.step, metric=metric, written=together(seen, "model"))
                    log.info("checkpoint %s", path)
                except ValueError as error:
                    trouble = str(error)
            if told := collective.everyone(trouble)[0]:
                raise ValueError(told)
        if self._config.save_hf:
            self._learner.export_hf(str(self._store.root / f"global_step{progress.step}_hf"), self._tokenizer)

    def check_shared(self) -> None:
        """Whether all ranks write into the folder of the first one. Raises ValueError, the same on all of them.

        Where the run would be saved by a warning of its job alone, it is said and the run goes on.
        """
        everyone, root = self._learner.collective.everyone, self._store.root
        if self._config.disable_ds:
            return
        with mark(root) if is_first() and root.is_dir() else nullcontext("") as own:
            first, name = everyone((str(root), own))[0]
            blind = everyone(f"{host()} (there it is {str(root)!r})" if name and not sees(root / name) else None)
        others = sorted({seen for seen in blind if seen is not None})
        if not others:
            return
        message = (
            f"--ckpt.path {first!r} of the first rank is another folder on {named(others)}: a checkpoint would be in "
            "pieces. Give an absolute path on a file system that all nodes share"
        )
        if self._config.save_steps > 0 or self._config.load_enable:
            raise ValueError(message)
        log.warning("%s; this run could not be saved at a warning", message)

    def restore(self) -> Progress:
        """Go on from the newest checkpoint if `--ckpt.load_enable` and there is one; else from the start.

        The first rank decides which one that is.
        """
        if not self._config.load_enable:
            return Progress()
        newest = self._learner.collective.everyone(self._store.latest() if is_first() else None)[0]
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
