"""`Record`: reads what a run recorded, also while it runs and after it was killed.

Example::

    record = Record.open("ckpt/checkpoints_ppo_ray/record/ppo_0131T09:30")
    record.complete_steps()                      # [1, 2, 3]: those whose samples of all ranks are there
    for group in record.groups(3):               # prompts in the order in which they were trained
        for sample in group.samples.values():    # `RecordedSample`
            print(sample.reward, record.decode(sample.tokens[sample.prompt_length :]))
            print(list(zip(record.pieces(sample.tokens), sample.engine_logprobs, strict=True)))
        for place, info in group.others.items():
            print(place, info["failure"])        # what was not trained on, and why
    record.steps()[3].metrics["train/reward"]
    record.alarms()                              # [{"step": 3, "name": "no_reward_variance", "state": "raised", ...}]
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsInt

import pyarrow as pa
import pyarrow.parquet as pq

from openrlhf.launcher.record.files import (
    ABOUT,
    ALARMS,
    CONFIG,
    IMAGES,
    SAMPLES,
    STEPS,
    TOKENIZER,
    StepFile,
    step_files,
)
from openrlhf.launcher.record.schema import FORMAT, RecordedGroup, RecordedSample, RecordedStep, samples_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

DEPTH = 5


def find_records(folder: Path | str) -> list[Path]:
    """The records in a folder, the newest last: itself, or what lies at most `DEPTH` levels below it."""
    root = Path(folder).expanduser()
    found = [path.parent for depth in range(DEPTH + 1) for path in root.glob("*/" * depth + ABOUT)]
    return sorted(found, key=lambda path: (path / ABOUT).stat().st_mtime)


@dataclass(frozen=True)
class Record:
    """The record in one folder. Every call reads the files anew; a file that is being written is not there yet."""

    folder: Path

    @staticmethod
    def open(folder: Path | str) -> Record:
        """The record in a folder; of several below it (runs of one --logger.record_dir) the newest.

        Raises ValueError where there is none, or one of a later version.
        """
        found = find_records(folder)
        if not found:
            raise ValueError(f"{str(folder)!r} holds no record of a run: there is no {ABOUT} in it")
        record = Record(found[-1])
        if record.about["format"] > FORMAT:
            raise ValueError(
                f"{str(record.folder)!r} was written by a later version (format {record.about['format']}, this one "
                f"reads up to {FORMAT})"
            )
        return record

    @cached_property
    def about(self) -> dict[str, Any]:
        """format, run (its id), name, ranks, prompts (of an episode)."""
        return json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))

    @property
    def config(self) -> Path:
        """The run's resolved configuration, for `--config`; secrets are masked."""
        return self.folder / CONFIG

    def steps(self) -> dict[int, RecordedStep]:
        """All steps by number, without tokens; also those whose samples were removed for room."""
        lines: dict[int, dict[str, Any]] = defaultdict(dict)
        for line in _lines(self.folder / STEPS):
            lines[line["step"]] |= line
        return {step: _step(line) for step, line in sorted(lines.items()) if "groups" in line}

    def evaluations(self) -> dict[int, dict[str, float]]:
        """The metrics of every evaluation by the number of steps before it; 0 is the model before training."""
        return {line["step"]: line["evaluation"] for line in _lines(self.folder / STEPS) if "evaluation" in line}

    def complete_steps(self) -> list[int]:
        """Steps whose samples of all ranks are there."""
        ranks: dict[int, set[int]] = defaultdict(set)
        for file in step_files(self.folder / SAMPLES):
            ranks[file.step].add(file.rank)
        known = self.steps()
        return sorted(step for step, there in ranks.items() if len(there) == self.about["ranks"] and step in known)

    def samples(self, step: int) -> list[RecordedSample]:
        """The trained samples of a step by their number in the rollout batch; empty where none are left."""
        tables = list(_tables(step_files(self.folder / SAMPLES), step))
        return sorted((s for table in tables for s in samples_of(table)), key=lambda sample: sample.index)

    def groups(self, step: int, recorded: RecordedStep | None = None) -> list[RecordedGroup]:
        """The groups of a step with their samples, in the order in which they were trained.

        recorded: the step, from whom has read all of them; else they are read again.
        """
        recorded = recorded or self.steps().get(step)
        by_group: dict[str, dict[int, RecordedSample]] = defaultdict(dict)
        for sample in self.samples(step):
            by_group[sample.group_id][sample.place] = sample
        groups = [] if recorded is None else recorded.groups
        return [replace(g, samples=dict(sorted(by_group[g.group_id].items()))) for g in groups]

    def images(self, step: int) -> dict[str, bytes]:
        """The contents of the images of a step, as image files, by name."""
        tables = _tables(step_files(self.folder / IMAGES), step)
        return {row["name"]: row["content"] for table in tables for row in table.to_pylist()}

    def alarms(self) -> list[dict[str, Any]]:
        """Every alarm in order: step, time, name, state ("raised" or "cleared"), evidence, fix (flags to turn)."""
        return list(_lines(self.folder / ALARMS))

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Tokens as text, special tokens too."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def pieces(self, tokens: Iterable[SupportsInt]) -> list[str]:
        """The text of each token; "" where a character ends in a later one. Together they are the text."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, int(token)) or "" for token in tokens]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / TOKENIZER))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file; a part of one that a killed run left is no row."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def _step(line: Mapping[str, Any]) -> RecordedStep:
    groups = [
        RecordedGroup(**(group | {"others": {int(place): info for place, info in group["others"].items()}}))
        for group in line["groups"]
    ]
    later = {name: line.get(name, {}) for name in ("metrics", "evaluation")}
    given = {name: line[name] for name in ("step", "time", "before", "sampling")}
    return RecordedStep(**given, groups=groups, **later)


def _tables(files: Sequence[StepFile], step: int) -> Iterator[pa.Table]:
    """What every rank wrote of a step. A file that cannot be read is named and left out."""
    for file in files:
        if file.step == step:
            try:
                yield pq.read_table(file.path)
            except (OSError, pa.ArrowInvalid) as error:
                log.warning("%s cannot be read and is left out: %s", file.path, error)
