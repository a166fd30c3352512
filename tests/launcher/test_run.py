"""The exit code of a run that a signal ends, whatever the parts make of the signal."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openrlhf.launcher import run, signals
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.trainer.loop import RunSummary
from support.report_runs import write_run


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(signals, "_received", None)
    before = {signum: signal.getsignal(signum) for signum in signals.HANDLED}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def interrupted_as(error: BaseException, signum: signal.Signals) -> Callable[[TrainPPOConfig], None]:
    """A run that receives a signal and whose parts turn the exit that it raises into `error`."""

    def part(config: TrainPPOConfig) -> None:
        del config
        try:
            os.kill(os.getpid(), signum)
        except SystemExit:
            raise error from None

    return part


@pytest.mark.parametrize("signum", signals.HANDLED)
@pytest.mark.parametrize("error", [SystemExit("as Ray words it"), SystemExit(1), RuntimeError("an actor died")])
def test_signal_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signum: signal.Signals, error: BaseException
) -> None:
    monkeypatch.setattr(run, "_run", interrupted_as(error, signum))
    assert run.train_ppo(TrainPPOConfig()) == 128 + signum
    printed = capsys.readouterr().err
    assert f"{signum.name} received" in printed
    assert "died" not in printed


def test_exit_without_a_signal_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(config: TrainPPOConfig) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(run, "_run", leave)
    with pytest.raises(SystemExit) as stop:
        run.train_ppo(TrainPPOConfig())
    assert stop.value.code == 3


def test_the_last_lines_say_how_it_went_and_where_the_report_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = write_run(tmp_path / "logs" / "first run", steps=2)
    flags = {"logger.tensorboard_dir": str(tmp_path / "logs"), "logger.wandb.run_name": "first run"}
    config = build(TrainPPOConfig(), flags)
    run.print_summary(config, RunSummary(steps=2, optimizer_steps=4, evaluation={"eval/eval_default_pass1": 0.75}))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "done: 2 steps, 4 optimiser steps"
    assert [line.strip().partition(":")[0] for line in printed if "The reward" in line] == ["The reward rose"]
    assert "  Alarms: no reward variance; the first at step 2." in printed
    assert f"  report: openrlhf-launch report {shlex.quote(str(logs))}" in printed


def test_a_run_that_left_no_files_ends_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = build(TrainPPOConfig(), {"logger.record_dir": "none", "ckpt.path": str(tmp_path)})
    run.print_summary(config, RunSummary(steps=1, optimizer_steps=1))
    assert "report" not in capsys.readouterr().out
    (tmp_path / "run").mkdir()
    assert run.how_it_went([tmp_path / "run", tmp_path / "gone"]) == []
