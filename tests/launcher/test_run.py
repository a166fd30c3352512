"""The exit code of a run that a signal ends, whatever the parts make of the signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from openrlhf.launcher import run, signals
from openrlhf.launcher.config import TrainPPOConfig


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
