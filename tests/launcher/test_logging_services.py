"""MLflow, Trackio, SwanLab and Comet: one sink; a run that goes on is the same run, and no step is sent twice."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.logging.logger import default_sinks
from openrlhf.launcher.logging.service_sink import SERVICES, service_sink
from openrlhf.launcher.logging.sinks import GeneratedSample, RunIdentity, UnusableSinkError

MODULES = {"MLflow": "mlflow", "Trackio": "trackio", "SwanLab": "swanlab", "Comet": "comet_ml"}


@dataclass
class Recorder:
    """Stands for any of the four packages; notes every call."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            if name == "search_runs":
                return [SimpleNamespace(info=SimpleNamespace(run_id="theirs"))]
            return self

        return call

    def logged(self) -> list[tuple[int, dict[str, float]]]:
        return [(kw["step"], args[0]) for name, args, kw in self.calls if name in ("log", "log_metrics")]

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture(params=sorted(MODULES))
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Recorder]:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, MODULES[request.param], recorder)  # pyright: ignore[reportArgumentType]
    return request.param, recorder


def run_of(folder: Path, *, goes_on: bool) -> RunIdentity:
    return RunIdentity(id="ab12", goes_on=goes_on, record=folder / "run.json")


def test_no_step_is_sent_twice_and_the_run_is_the_same(package: tuple[str, Recorder], tmp_path: Path) -> None:
    name, recorder = package
    for goes_on, steps in ((False, (1, 2, 3)), (True, (3, 4))):  # killed after step 3, resumed from step 2
        sink = service_sink(name, "project", "run", {"seed": 1}, run_of(tmp_path, goes_on=goes_on))
        if goes_on:
            sink.resume(2)
        for step in steps:
            sink.log_step(step, {"train/reward": step / 2})
        sink.log_evaluation(steps[-1], {"eval/x": 1.0})
        sink.log_samples(steps[-1], [GeneratedSample(text="text", reward=1.0)])
        sink.close()
    numbers = [step for step, metrics in recorder.logged() if "train/reward" in metrics]
    assert numbers == [1, 2, 3, 4]
    assert [step for step, metrics in recorder.logged() if "eval/x" in metrics] == [3, 4]
    opened = [kw for call in ("init", "start") for _, kw in recorder.of(call)]
    if name == "MLflow":
        assert recorder.of("start_run")[1] == ((), {"run_id": "theirs"})
        assert recorder.of("search_runs")[0][1]["filter_string"] == "tags.openrlhf_run = 'ab12'"
    elif name == "Trackio":
        assert [(kw["name"], kw["resume"]) for kw in opened] == [("run-ab12", "never"), ("run-ab12", "allow")]
    else:
        key = "id" if name == "SwanLab" else "experiment_key"
        assert opened[0][key] == opened[1][key]


def test_the_configuration_comes_without_secrets(package: tuple[str, Recorder], tmp_path: Path) -> None:
    name, recorder = package
    flags: dict[str, Any] = {f"logger.{name.lower()}": "mine", "logger.wandb.run_name": "r", "reward.api_key": "s3cret"}
    sinks = default_sinks(build(TrainPPOConfig(), flags), run_of(tmp_path, goes_on=False), None)
    assert [sink.name for sink in sinks[1:]] == [name]
    assert "mine" in str(recorder.calls)
    assert "s3cret" not in str(recorder.calls)
    assert "'reward.api_key': '***'" in str(recorder.calls)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_missing_package_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)  # pyright: ignore[reportArgumentType]
    expected = rf"--logger.{name.lower()} needs the package {MODULES[name]}: pip install 'openrlhf-launcher\["
    with pytest.raises(UnusableSinkError, match=expected):
        service_sink(name, "p", "r", {}, run_of(tmp_path, goes_on=False))


def test_all_services_have_a_flag() -> None:
    assert set(SERVICES) == set(MODULES)
    assert {name.lower() for name in SERVICES} <= set(vars(TrainPPOConfig().logger))
