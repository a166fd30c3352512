"""Where a record lies, and how much room each rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.outputs import absolute, outputs
from openrlhf.launcher.record.place import record_folder, record_place


def configuration(**flags: Any) -> TrainPPOConfig:
    own = {"ckpt.path": "/c", "logger.wandb.run_name": "run", "actor.num_gpus_per_node": 4}
    return build(TrainPPOConfig(), own | {name.replace("__", "."): value for name, value in flags.items()})


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ({}, "/c/record/run"),
        ({"logger__tensorboard_dir": "/t"}, "/t/run/record"),
        ({"logger__record_dir": "/r", "logger__tensorboard_dir": "/t"}, "/r/run"),
        ({"logger__record_dir": "none", "logger__tensorboard_dir": "/t"}, None),
    ],
)
def test_the_folder_of_a_record(flags: dict[str, Any], folder: str | None) -> None:
    config = configuration(**flags)
    assert record_folder(config) == (None if folder is None else Path(folder))
    assert [o.path for o in outputs(config) if o.what == "record"] == ([] if folder is None else [Path(folder)])
    assert (record_place(config) is None) is (folder is None)


def test_a_relative_folder_is_that_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert record_folder(absolute(configuration(logger__record_dir="here"))) == tmp_path / "here" / "run"
    assert absolute(configuration(logger__record_dir="none")).logger.record_dir == "none"


def test_the_ranks_share_the_room() -> None:
    place = record_place(configuration(logger__record_max_gib=2.0))
    assert place is not None
    assert place.max_bytes == 2**29
    halves = record_place(configuration(logger__record_max_gib=2.0, ds__tensor_parallel_size=2))
    assert halves is not None
    assert halves.max_bytes == 2**30  # of two ranks that hold one model the first one writes
