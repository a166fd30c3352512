"""A logger of the user's: it gets what the others get, and what it lacks is said before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.logging.logger import RunLogger
from openrlhf.launcher.logging.own_sink import load_sink
from openrlhf.launcher.logging.sinks import ConsoleSink, UnusableSinkError

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "logger.py"


def logger(path: str, folder: Path, **flags: Any) -> RunLogger:
    values = {"logger.path": path, "ckpt.output_dir": str(folder), "logger.wandb.key": None} | flags
    return RunLogger(build(TrainPPOConfig(), values))


def test_the_example_logs_beside_the_others(tmp_path: Path) -> None:
    own = logger(f"{EXAMPLE}:CsvLogger", tmp_path)  # logger.path
    own.log_step(1, {"train/reward": 0.5})
    own.log_step(2, {"train/reward": 0.75})
    own.log_evaluation(2, {"eval/x": 1.0})
    own.resume(1)
    own.log_step(2, {"train/reward": 1.0})
    own.close()
    assert (tmp_path / "rewards.csv").read_text().splitlines() == ["step,reward", "1,0.5", "2,1.0"]


SINK = EXAMPLE.read_text()


def test_a_class_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_sinks.py").write_text(SINK)
    monkeypatch.syspath_prepend(tmp_path)
    sink: Any = load_sink("my_package.my_sinks:CsvLogger")
    assert sink.name == "rewards.csv"


WRONG = {
    "no class named": (":", None, r"give file\.py:Class or module:Class"),
    "no file": ("{}/none.py:CsvLogger", None, r"--logger\.path: file not found"),
    "no module": ("no_such_module:Sink", None, r"cannot be imported: ModuleNotFoundError"),
    "broken": ("{}/own.py:CsvLogger", "1 / 0", r"cannot be imported: ZeroDivisionError"),
    "no class": ("{}/own.py:Other", SINK, r"own\.py has no class Other"),
    "no method": (
        "{}/own.py:CsvLogger",
        SINK.replace("def log_samples", "def _"),
        r"has no log_samples\(self, step, samp",
    ),
    "wrong method": (
        "{}/own.py:CsvLogger",
        SINK.replace("(self, step, metrics)", "(self)"),
        r"has no log_step\(self, st",
    ),
    "wrong constructor": (
        "{}/own.py:CsvLogger",
        SINK.replace("(self, config, run)", "(self)"),
        r"has no __init__\(self, c",
    ),
    "no name": ("{}/own.py:CsvLogger", SINK.replace('name = "rewards.csv"', ""), r"has no `name`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_logger_ends_the_run_at_its_start(name: str, tmp_path: Path) -> None:
    path, content, reason = WRONG[name]
    if content is not None:
        (tmp_path / "own.py").write_text(content)
    with pytest.raises(UnusableSinkError, match=reason):
        logger(path.format(tmp_path), tmp_path)


def test_one_that_fails_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "own.py").write_text(
        SINK.replace("def log_step(self, step, metrics):", "def log_step(self, step, metrics):\n        1 / 0")
    )
    own = logger(f"{tmp_path}/own.py:CsvLogger", tmp_path)
    own.log_step(1, {"train/reward": 0.5})
    own.log_step(2, {"train/reward": 0.5})
    assert [r.getMessage() for r in caplog.records if "rewards.csv failed (ZeroDivisionError" in r.getMessage()]
    assert ConsoleSink.name == "the progress line"
