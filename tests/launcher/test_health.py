"""Every sick run is named by its alarm within a few steps; healthy runs are left alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrlhf.launcher.health.checks import ALARMS, Expected
from openrlhf.launcher.health.observation import Observation
from openrlhf.launcher.health.watch import QUIET, HealthWatch, News, health_watch
from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.signals import ALARM_EXIT, StoppedByAlarm, saved
from openrlhf.launcher.trainer.loop import Trainer
from support.sick_runs import SICK, Sickness, sick_run
from support.trainer_fakes import FakeRun


def recorded(run: FakeRun, folder: Path) -> Record:
    """The record of a run on fakes, once it has run."""
    record = RunRecord(folder, run="r", name="r", ranks=1, goes_on=False, config_toml="")
    run.trainer = Trainer(run.config, replace(run.trainer.parts, record=record))
    run.run()
    return Record.open(folder)


def test_every_alarm_has_a_sick_run() -> None:
    assert {sickness.name for sickness in SICK} == set(ALARMS)
    assert len(SICK) >= 16


@pytest.mark.parametrize("sickness", SICK, ids=lambda s: s.name)
def test_a_sick_run_is_named(sickness: Sickness, tmp_path: Path) -> None:
    told = [a for a in recorded(sick_run(sickness), tmp_path / "record").alarms() if a["state"] == "raised"]
    steps = {alarm["name"]: alarm["step"] for alarm in told}
    assert steps.get(sickness.name, 99) <= sickness.within, steps
    found = next(alarm for alarm in told if alarm["name"] == sickness.name)
    assert found["evidence"]
    assert found["fix"] == ALARMS[sickness.name].fix


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_none(seed: int, tmp_path: Path) -> None:
    run = sick_run(Sickness(name="none"), steps=40, seed=seed)
    assert recorded(run, tmp_path / "record").alarms() == []
    assert [step["health/alarms"] for step in run.sink.steps] == [0.0] * 40


def test_a_solved_task_is_no_sickness(tmp_path: Path) -> None:
    """In the end all answers are right, and the same."""

    def solved(step: int, rng: Any, item: Any) -> dict[str, Any]:
        return {"reward": 1.0, "answer": item.position} if rng.random() < step / 15 else {"reward": 0.0}

    run = sick_run(
        Sickness(name="none", sample=solved, metrics=lambda step, rng: {"train/entropy_loss": 0.5 * 0.8**step}),
        steps=40,
    )
    assert recorded(run, tmp_path / "record").alarms() == []


def observation(step: int, **metrics: float) -> Observation:
    return Observation(step=step, metrics={f"train/{name}": value for name, value in metrics.items()})


def test_an_alarm_is_told_once_until_it_has_been_quiet() -> None:
    watch = HealthWatch(Expected(max_norm=1.0))
    kl = [0.1] + [2.0] * 4 + [0.1] + [2.0] * 2 + [0.1] * QUIET + [0.1] + [2.0] * 2
    news = [n for step, value in enumerate(kl, 1) for n in watch.see(observation(step, kl=value))]
    assert [(n.step, n.state) for n in news] == [(3, "raised"), (8 + QUIET, "cleared"), (14, "raised")]
    assert watch.active == ["kl_runaway"]
    assert str(news[0]) == (
        "step 3: kl_runaway: the KL to the reference is 2 nats per token, and was 0.1. What helps: "
        "--algo.kl.init_coef, --actor.adam.lr"
    )


def test_a_policy_that_comes_closer_to_a_teacher_does_not_leave_it() -> None:
    watch = HealthWatch(Expected(max_norm=1.0))
    kl = [1.2, 1.6, 1.5, 0.9, 1.1, 0.4, 0.1]
    assert [n for step, value in enumerate(kl, 1) for n in watch.see(observation(step, kl=value))] == []
    assert [n.step for n in watch.see(observation(8, kl=1.0)) + watch.see(observation(9, kl=1.5))] == [9]


@pytest.mark.parametrize("sickness", [s for s in SICK if s.name != "length_growth"], ids=lambda s: s.name)
def test_a_resumed_run_tells_what_the_whole_one_does(sickness: Sickness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken off after every step; a trend alone needs its steps anew."""
    seen: list[Observation] = []
    whole: list[News] = []
    see = HealthWatch.see

    def kept(watch: HealthWatch, now: Observation) -> list[News]:
        seen.append(now)
        whole.extend(found := see(watch, now))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(HealthWatch, "see", kept)
        run = sick_run(sickness)
        run.run()
    told, state = [], None
    for observation in seen:
        watch = health_watch(run.config)
        assert watch is not None
        if state is not None:
            watch.load_state_dict(json.loads(state))
        told += watch.see(observation)
        state = json.dumps(watch.state_dict(), allow_nan=False)
    assert [n.name for n in whole if n.state == "raised"].count(sickness.name) >= 1
    assert [(n.step, n.name, n.state) for n in told] == [(n.step, n.name, n.state) for n in whole]


def test_a_resumed_run_that_alarms_end_is_ended_by_what_still_stands(tmp_path: Path) -> None:
    sickness = next(s for s in SICK if s.name == "gradient_zero")
    flags: dict[str, Any] = {"logger__health": "stop", "ckpt__path": str(tmp_path / "checkpoints")}
    with pytest.raises(StoppedByAlarm):
        sick_run(sickness, **flags).run()
    again = sick_run(sickness, **flags, ckpt__load_enable=True)
    again.sink.first = 4
    with pytest.raises(StoppedByAlarm, match="stopped after step 6 "):
        again.run()


def test_a_checkpoint_from_before_alarms_is_read(tmp_path: Path) -> None:
    healthy = Sickness(name="none")
    flags = {"ckpt__path": str(tmp_path), "ckpt__save_steps": 1, "train__max_steps": 2}
    sick_run(healthy, **flags).run()
    [*_, file] = sorted(tmp_path.rglob("trainer.json"))
    state = json.loads(file.read_text())
    del state["health"]
    file.write_text(json.dumps(state))
    resumed = sick_run(healthy, **(flags | {"train__max_steps": 3}), ckpt__load_enable=True)
    resumed.sink.first = 3
    assert resumed.run().steps == 3


def test_stop_saves_and_ends_the_run(tmp_path: Path) -> None:
    sickness = next(s for s in SICK if s.name == "gradient_zero")
    run = sick_run(sickness, logger__health="stop", ckpt__path=str(tmp_path / "checkpoints"))
    with pytest.raises(StoppedByAlarm, match=r"stopped after step 3 by --logger.health stop \(gradient_zero\)") as stop:
        run.run()
    assert (tmp_path / "checkpoints" / "global_step3" / "state" / "trainer.json").is_file()
    assert saved(stop.value) == ALARM_EXIT == 87


def test_off_watches_nothing() -> None:
    run = sick_run(next(s for s in SICK if s.name == "gradient_zero"), steps=5, logger__health="off")
    assert health_watch(run.config) is None
    run.run()
    assert "health/alarms" not in run.sink.steps[-1]


def test_the_page_has_a_row_for_every_alarm() -> None:
    page = (Path(__file__).parents[2] / "docs" / "seeing_a_run.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in ALARMS)


def test_flags_to_turn_are_flags() -> None:
    from openrlhf.launcher.commands import TRAIN_PPO_RAY

    named = {word.strip(",()") for alarm in ALARMS.values() for word in alarm.fix.split() if word.startswith("--")}
    named |= {word.strip("(),") for alarm in ALARMS.values() for word in alarm.fix.split() if "--" in word}
    assert {name.removeprefix("--") for name in named} <= set(TRAIN_PPO_RAY.flags)
