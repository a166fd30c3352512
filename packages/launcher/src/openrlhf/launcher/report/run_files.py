"""What a run left behind for a report: metrics, evaluations, configuration, alarms, the record of its samples."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.launcher.commands import COMMANDS, TRAIN_PPO_RAY, Command
from openrlhf.launcher.flags import values_of
from openrlhf.launcher.logging.logger import METRICS
from openrlhf.launcher.logging.sinks import metrics_row, row_kind
from openrlhf.launcher.outputs import CONFIG_NAMES
from openrlhf.launcher.record.reader import Record, find_records

DEPTHS = ("", "*/", "*/*/", "*/*/*/")
"""How far below the folder that is given a run is looked for."""
SOURCES = (
    "actor.model_name_or_path",
    "ref.model_name_or_path",
    "ref.remote_url",
    "reward.model_name_or_path",
    "reward.remote_url",
    "reward.weights",
    "reward.choose_by",
    "judge.rubric",
    "train.agent_func_path",
    "data.prompt_dataset",
    "data.prompt_split",
    "data.input_key",
    "data.label_key",
    "data.dataset",
    "eval.dataset",
    "eval.split",
    "model.model_name_or_path",
)
"""Flags that say where models, data and rewards come from."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The metrics of one step or one evaluation. time: seconds since the epoch."""

    step: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One flag of the resolved configuration. default: what it is where nobody gives it."""

    name: str
    value: str
    default: str
    help: str


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run, as its files tell it. record: None where it recorded no samples."""

    name: str
    folder: Path
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    settings: Sequence[Setting] = ()
    alarms: Sequence[Mapping[str, Any]] = ()
    record: Record | None = None

    @property
    def sources(self) -> dict[str, str]:
        """Flag -> where models, data and rewards come from, as far as they were given."""
        given = {setting.name: setting.value for setting in self.settings if setting.value != setting.default}
        return {name: given[name] for name in SOURCES if name in given}


def read_run(folder: Path | str) -> RunFiles:
    """The run in a folder, or the newest of those up to three levels below it.

    Raises ValueError where there is none.
    """
    root = Path(folder).expanduser()
    logs = sorted((p for d in DEPTHS for p in root.glob(d + METRICS)), key=lambda path: path.stat().st_mtime)
    records = find_records(root)
    if not logs and not records:
        raise ValueError(
            f"{str(root)!r} holds nothing of a run: no {METRICS} (written with --logger.tensorboard_dir) and no record "
            "of samples (--logger.record_dir), here or up to three folders below"
        )
    metrics = logs[-1] if logs else None
    record = _record_of(metrics, records)
    home = records[-1] if metrics is None else metrics.parent
    steps, evaluations = _by_kind([] if metrics is None else _rows(metrics))
    if record is not None and not steps:
        steps = [Row(step=n, time=s.time, metrics=s.metrics) for n, s in record.steps().items() if s.metrics]
    if record is not None and not evaluations:
        evaluations = [Row(step=step, time=0.0, metrics=told) for step, told in record.evaluations().items()]
    name = home.name if record is None else str(record.about.get("name", home.name))
    return RunFiles(
        name=name,
        folder=home,
        steps=steps,
        evaluations=evaluations,
        settings=_settings(home, record),
        alarms=[] if record is None else record.alarms(),
        record=record,
    )


def _record_of(metrics: Path | None, records: Sequence[Path]) -> Record | None:
    """The record that belongs to a metrics file: below its folder, of its name, or the only one."""
    if metrics is None:
        return Record.open(records[-1])
    for path in reversed(records):
        if path.is_relative_to(metrics.parent) or path.name == metrics.parent.name:
            return Record.open(path)
    return Record.open(records[0]) if len(records) == 1 else None


def _rows(path: Path) -> list[dict[str, Any]]:
    return [row for line in path.read_bytes().splitlines() if (row := metrics_row(line))]


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Row], list[Row]]:
    """Steps and evaluations, the last of each where a run has logged one twice."""
    found: dict[str, dict[int, Row]] = {"step": {}, "evaluation": {}, "samples": {}}
    for row in rows:
        values = {k: float(v) for k, v in row.items() if k not in ("step", "time") and isinstance(v, int | float)}
        found[row_kind(row)][row["step"]] = Row(step=row["step"], time=float(row.get("time", 0.0)), metrics=values)
    steps, evaluations = ([kind[step] for step in sorted(kind)] for kind in (found["step"], found["evaluation"]))
    return steps, evaluations


def _settings(home: Path, record: Record | None) -> list[Setting]:
    places = [home / name for name in CONFIG_NAMES] + ([] if record is None else [record.config])
    for place in places:
        if place.is_file():
            return settings_of(place.read_text(encoding="utf-8"))
    return []


def settings_of(toml: str) -> list[Setting]:
    """The flags of a saved configuration; those that a later version no longer knows too. [] where it is none."""
    try:
        saved = _flat(tomllib.loads(toml))
    except tomllib.TOMLDecodeError:
        return []
    command = _command(toml)
    defaults = values_of(command.defaults)
    flags = {flag.path: flag for flag in command.flags.values() if not flag.off}
    known = [
        Setting(
            name=name,
            value=_text(saved.get(name)),
            default=flag.show(defaults[name]) if defaults[name] in flag.shape.words.values() else _text(defaults[name]),
            help=flag.help,
        )
        for name, flag in flags.items()
        if name in saved or defaults[name] is None  # what is None is not written; others came with a later version
    ]
    unknown = [Setting(name=n, value=_text(v), default="", help="") for n, v in saved.items() if n not in flags]
    return known + unknown


def _command(toml: str) -> Command[Any]:
    named = re.match(r"# .*openrlhf\.cli\.(\w+)", toml)
    return COMMANDS.get(named.group(1), TRAIN_PPO_RAY) if named else TRAIN_PPO_RAY


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
