"""`RunRecord`: the controller's part of a record, scalars alone. What fails here costs one warning, never the run."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.logging.values import finite
from openrlhf.launcher.record.files import (
    ABOUT,
    ALARMS,
    CONFIG,
    IMAGES,
    SAMPLES,
    STEPS,
    TEMPORARY,
    TOKENIZER,
    step_files,
)
from openrlhf.launcher.record.place import record_folder, writing_ranks
from openrlhf.launcher.record.schema import FORMAT
from openrlhf.launcher.redaction import redact
from openrlhf.launcher.samples import Group, SampleRef
from openrlhf.launcher.saved import saved_run_id
from openrlhf.learner.folders.files import replace_file

log = logging.getLogger(__name__)

SHOWN_COLUMN = 2000
"""Characters of JSON up to which a column's value is recorded whole."""
OWN = (ABOUT, CONFIG, TOKENIZER, STEPS, ALARMS, SAMPLES, IMAGES)


class RunRecord:
    """Writes what the trainer knows of every step. The folder is there, and held by this run.

    run: the run's id and name. ranks: how many write samples. goes_on: the run was started before. prompts: how many an
    episode has.
    Raises ValueError where the folder holds files of these names that are no record.
    """

    def __init__(
        self, folder: Path, *, run: str, name: str, ranks: int, goes_on: bool, config_toml: str, prompts: int = 0
    ) -> None:
        self.folder = folder
        self._failed = False
        taken = [own for own in OWN if (folder / own).exists()]
        if taken and not (folder / ABOUT).is_file():
            raise ValueError(
                f"--logger.record_dir: {str(folder / taken[0])!r} was written by no run: move it away, or give another "
                "folder"
            )
        if taken and not goes_on:
            step_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "run": run, "name": name, "ranks": ranks, "prompts": prompts}
        replace_file(folder / CONFIG, config_toml)
        replace_file(folder / ABOUT, json.dumps(about) + "\n")

    def tokenizer(self, save: Callable[[str], Any]) -> None:
        """Keep the tokenizer. save: writes its file, as `tokenizers.Tokenizer.save` does."""

        def write() -> None:
            new = self.folder / f"{TEMPORARY}{TOKENIZER}"
            save(str(new))
            os.replace(new, self.folder / TOKENIZER)

        self._try(write)

    def resume(self, step: int) -> None:
        """The run goes on after `step` steps: what is recorded beyond them goes."""

        def drop() -> None:
            for name in (STEPS, ALARMS):
                path = self.folder / name
                if path.is_file():
                    replace_file(path, "".join(line + "\n" for line in _up_to(step, path)))
            for kind in (SAMPLES, IMAGES):
                for file in step_files(self.folder / kind):
                    if file.step > step:
                        file.path.unlink(missing_ok=True)

        self._try(drop)

    def batch(
        self,
        step: int,
        groups: Sequence[Group],
        trained: Sequence[SampleRef],
        *,
        before: Mapping[str, Any],
        sampling: Mapping[str, float],
    ) -> None:
        """A rollout batch that will be trained on next. trained: those of its samples that go to the ranks."""
        sent = {(id(sample.handle), sample.position) for sample in trained}
        row = {
            "step": step,
            "time": time.time(),
            "before": before,
            "sampling": dict(sampling),
            "groups": [_group(group, sent) for group in groups],
        }
        self._append(STEPS, row)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a step."""
        self._append(STEPS, {"step": step, "metrics": finite(metrics)})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation after so many steps."""
        self._append(STEPS, {"step": step, "evaluation": finite(metrics)})

    def alarm(self, row: Mapping[str, Any]) -> None:
        """An alarm that came or went."""
        self._append(ALARMS, row)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        def write() -> None:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")

        self._try(write)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # a record is no reason to stop training
            if not self._failed:
                self._failed = True
                log.warning(
                    "the record in %s failed (%s: %s); the run goes on, further failures are not reported",
                    self.folder,
                    type(error).__name__,
                    error,
                )


def open_record(config: TrainPPOConfig, tokenizer: Any, *, run: str, toml: str, prompts: int) -> RunRecord | None:
    """The record of a resolved configuration's run, where it has one. tokenizer: of transformers. run: its id."""
    folder = record_folder(config)
    if folder is None:
        return None
    goes_on = saved_run_id(config) is not None
    name, ranks = config.logger.wandb.run_name, writing_ranks(config)
    about: dict[str, Any] = {"run": run, "name": name, "ranks": ranks, "prompts": prompts}
    record = RunRecord(folder, **about, goes_on=goes_on, config_toml=toml)
    record.tokenizer(tokenizer.backend_tokenizer.save)
    return record


def step_aside(folder: Path) -> Path:
    """Move an earlier run's record to `<folder>.1`, or the next number that is free."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for name in OWN:
        with suppress(FileNotFoundError):
            os.rename(folder / name, aside / name)
    log.warning("the record of an earlier run of this name is now in %s", aside)
    return aside


def _group(group: Group, sent: Collection[tuple[int, int]]) -> dict[str, Any]:
    others = {
        place: asdict(sample) | {"failure": redact(sample.failure)}
        for place, sample in enumerate(group.samples)
        if (id(group.handle), place) not in sent
    }
    prompt = group.prompt
    return {
        "group_id": prompt.group_id,
        "position": prompt.position,
        "episode": prompt.episode,
        "datasource": prompt.datasource,
        "environment": prompt.environment,
        "columns": {name: _short(value) for name, value in prompt.columns.items()},
        "count": len(group.samples),
        "others": others,
    }


def _short(value: Any) -> Any:
    """A column's value; the beginning of its JSON text where that is long, as the tests of a program are."""
    text = json.dumps(value)
    return value if len(text) <= SHOWN_COLUMN else text[:SHOWN_COLUMN] + "…"


def _up_to(step: int, path: Path) -> list[str]:
    """The whole lines of a file that speak of no later step."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line)
    return kept
