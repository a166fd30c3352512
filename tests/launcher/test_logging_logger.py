from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrlhf.launcher.config import RunLoggerConfig, TrainPPOConfig, WandbConfig
from openrlhf.launcher.logging.logger import RunLogger, masked
from openrlhf.launcher.logging.sinks import ConsoleSink, GeneratedSample, JsonLinesSink, Metrics, duration

STEP = {
    "train/reward": 0.5,
    "train/response_length": 9.75,
    "train/kl": 0.001,
    "train/policy_loss": -0.25,
    "rollout/num_samples": 8.0,
    "timing/step_total": 1.5,
    "timing/generation": 0.5,
    "timing/ppo_train": 0.75,
}


def configuration(**options: Any) -> TrainPPOConfig:
    return TrainPPOConfig(logger=RunLoggerConfig(**options))


class Recorder:
    """A sink that keeps what it is given, and fails on request."""

    name = "recorder"

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.steps: list[tuple[int, dict[str, float]]] = []

    def resume(self, step: int) -> None:
        self.log_step(step, {"resumed": 1.0})

    def log_step(self, step: int, metrics: Metrics) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.steps.append((step, dict(metrics)))

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        self.log_step(step, metrics)

    def log_samples(self, step: int, samples: Sequence[GeneratedSample]) -> None:
        self.log_step(step, {"samples": len(samples)})

    def close(self) -> None:
        self.log_step(-1, {})


def test_logging_steps_and_finite_values() -> None:
    sink = Recorder()
    logger = RunLogger(configuration(logging_steps=2), sinks=[sink])
    for step in range(1, 5):
        logger.log_step(step, {"train/reward": float(step), "train/kl": math.nan})
    logger.log_evaluation(3, {"eval/eval_x_pass1": 1.0})
    assert sink.steps == [
        (2, {"train/reward": 2.0}),
        (4, {"train/reward": 4.0}),
        (3, {"eval/eval_x_pass1": 1.0}),
    ]


def test_a_broken_logger_warns_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    broken, sink = Recorder(broken=True), Recorder()
    logger = RunLogger(configuration(), sinks=[broken, sink])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            logger.log_step(step, STEP)
        logger.log_samples(3, [GeneratedSample(text="t")])
        logger.close()
        logger.close()
    assert [step for step, _ in sink.steps] == [0, 1, 2, 3, -1]
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == [
        "recorder failed (OSError: [Errno 28] No space left on device)"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonLinesSink(Path("/dev/full"))
    logger = RunLogger(configuration(), sinks=[sink])
    with caplog.at_level(logging.WARNING):
        logger.log_step(1, STEP)
        logger.log_step(2, STEP)
        logger.close()
    assert caplog.text.count("metrics.jsonl failed (OSError: [Errno 28]") == 1


def test_progress_line() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.log_step(3, STEP)
    sink.log_evaluation(3, {"eval/eval_default_pass1": 0.875, "eval/eval_num_samples": 64.0})
    assert stream.getvalue().splitlines() == [
        "step 3  reward 0.5  length 9.75  kl 0.001  loss -0.25  | 1.50s: gen 0.50 train 0.75",
        "eval at step 3  default_pass1 0.875",
    ]


def test_l17_the_progress_line_says_how_far_it_is() -> None:
    stream, now = io.StringIO(), iter([100.0, 110.0, 140.0, 4000.0, 5000.0])
    sink = ConsoleSink(stream, steps=2000, clock=lambda: next(now))
    for step in (7, 9, 13, 1000, 2000):  # resumed after 6 steps
        sink.log_step(step, {"train/reward": 0.5})
    assert stream.getvalue().splitlines() == [
        "step 7 of 2000  reward 0.5",
        "step 9 of 2000  reward 0.5  | 2 h 45 min left",
        "step 13 of 2000  reward 0.5  | 3 h 40 min left",
        "step 1000 of 2000  reward 0.5  | 1 h 05 min left",
        "step 2000 of 2000  reward 0.5",
    ]
    assert [duration(s) for s in (0.4, 59.4, 61, 3599)] == ["0 s", "59 s", "1 min 01 s", "59 min 59 s"]


def test_a_terminal_has_a_bar_below_the_last_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, now = Terminal(), iter([0.0, 10.0])
    sink = ConsoleSink(stream, steps=20, clock=lambda: next(now))
    sink.log_step(1, {"train/reward": 0.5})
    sink.log_step(10, {"train/reward": 0.5})
    sink.close()
    first, second = "[#-------------------] 5%\r", "[##########----------] 50%, 11 s left\r"
    assert stream.getvalue() == (
        f"\x1b[Kstep 1 of 20  reward 0.5\n{first}\x1b[Kstep 10 of 20  reward 0.5\n{second}\x1b[K"
    )


def test_tensorboard_and_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration(tensorboard_dir=str(tmp_path), wandb=WandbConfig(run_name="run 1"))
    logger = RunLogger(config)
    logger.log_step(1, STEP)
    logger.log_evaluation(1, {"eval/eval_default_pass1": 0.5})
    logger.log_samples(1, [GeneratedSample(text="a prompt, a response", label="7", reward=1.0)])
    logger.close()
    events = EventAccumulator(str(tmp_path / "run 1"))
    events.Reload()
    assert {k: events.Scalars(k)[0].value for k in STEP} == pytest.approx(STEP)
    assert events.Scalars("eval/eval_default_pass1")[0].step == 1
    assert "generated_samples/0/text_summary" in events.Tags()["tensors"]
    rows = [json.loads(line) for line in (tmp_path / "run 1" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 1
    assert rows[0]["train/reward"] == 0.5
    assert rows[2]["generated_samples"] == [{"text": "a prompt, a response", "label": "7", "reward": 1.0}]
    assert "step 1  reward 0.5" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--logger\.tensorboard_dir"):
        RunLogger(configuration(tensorboard_dir=str(tmp_path / "file")))


def test_secrets_are_masked() -> None:
    config = configuration(wandb=WandbConfig(key="geheim", project="p"))
    values = masked(config)
    assert values["logger.wandb.key"] == "***"
    assert values["logger.wandb.project"] == "p"
    assert values["data.input_key"] == "input"
    assert "geheim" not in str(values)


WANDB_RUN = """
import sys
from openrlhf.launcher.config import RunLoggerConfig, TrainPPOConfig, WandbConfig
from openrlhf.launcher.logging.logger import RunLogger
from openrlhf.launcher.logging.sinks import GeneratedSample
wandb = WandbConfig(
    key="k" * 40, org="some-org", group="some-group", project="some-project", run_name="some-run"
)
logger = RunLogger(TrainPPOConfig(logger=RunLoggerConfig(wandb=wandb)))
for step in (1, 2):
    logger.log_step(step, {"train/reward": 0.5, "train/my_log": 3.0})
    logger.log_samples(step, [GeneratedSample(text="text", label="7", reward=1.0)])
logger.log_evaluation(2, {"eval/eval_default_pass1": 0.5})
logger.close()
"""


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", WANDB_RUN]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not work" not in done.stderr
    run = next((tmp_path / "wandb").glob("offline-run-*"))
    log = next(run.glob("*.wandb")).read_bytes()
    for text in (
        b"some-org",
        b"some-group",
        b"some-project",
        b"some-run",
        b"train/reward",
        b"train/my_log",
        b"eval/eval_default_pass1",
        b"train/generated_samples",
    ):
        assert text in log
    assert b"k" * 40 not in log
    tables = list((run / "files" / "media" / "table").rglob("*.table.json"))
    assert len(tables) == 2
    data = max((json.loads(t.read_text()) for t in tables), key=lambda t: len(t["data"]))
    assert data["columns"] == ["global_step", "text", "label", "reward"]
    assert data["data"] == [[1, "text", "7", 1.0], [2, "text", "7", 1.0]]


def test_missing_wandb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"--logger\.wandb\.key needs .*pip install 'openrlhf\[wandb\]'"):
        RunLogger(configuration(wandb=WandbConfig(key="k")))


def test_wandb_that_does_not_start_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb")

    def fail(**options: Any) -> None:
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "init", fail)
    with caplog.at_level(logging.WARNING):
        logger = RunLogger(configuration(wandb=WandbConfig(key="k")))
    logger.log_step(1, STEP)
    assert "Weights & Biases does not work (CommError: no route to host)" in caplog.text
