"""A run that goes on after a kill is the same run in its logs, and no step stands there twice."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.logging.logger import RunLogger
from openrlhf.launcher.logging.sinks import GeneratedSample
from openrlhf.launcher.logging.wandb_sink import STEP
from openrlhf.learner.checkpoint_dir import CheckpointStore


def configuration(root: Path, *, resume: bool = False, wandb: bool = False) -> TrainPPOConfig:
    flags: dict[str, Any] = {
        "ckpt.path": f"{root}/ckpt",
        "ckpt.save_steps": 2,
        "ckpt.load_enable": resume,
        "logger.wandb.run_name": "r",
        "logger.tensorboard_dir": f"{root}/logs",
    }
    (root / "ckpt").mkdir(exist_ok=True)
    return build(TrainPPOConfig(), flags | ({"logger.wandb.key": "k"} if wandb else {}))


def log(logger: RunLogger, steps: range, *, value: float = 0.0) -> None:
    for step in steps:
        logger.log_step(step, {"train/reward": step + value})
        logger.log_samples(step, [GeneratedSample(text=f"{step}")])
        if step % 2 == 0:
            logger.log_evaluation(step, {"eval/pass1": step + value})


def save(root: Path, step: int, run_id: str) -> None:
    store = CheckpointStore(root / "ckpt")
    folder = store.begin(step) / "state"
    folder.mkdir()
    (folder / "trainer.json").write_text(json.dumps({"run": run_id}))
    store.commit(step)


def rows(root: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = (root / "logs" / "r" / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def test_n07_steps_since_the_checkpoint_stand_in_the_logs_once(tmp_path: Path) -> None:
    first = RunLogger(configuration(tmp_path))
    log(first, range(1, 6))
    save(tmp_path, 4, first.run_id)
    first.close()
    with (tmp_path / "logs" / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/rew')  # killed while it wrote
    second = RunLogger(configuration(tmp_path, resume=True))
    assert second.run_id == first.run_id
    second.resume(4)
    second.log_evaluation(4, {"eval/pass1": 4.0})  # made again, as at the end of a run
    log(second, range(5, 8), value=0.5)
    second.close()
    found = rows(tmp_path)
    assert [row["step"] for row in found if "train/reward" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in found if "eval/pass1" in row] == [2, 4, 6]
    assert [row["step"] for row in found if "generated_samples" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["train/reward"] for row in found if row["step"] == 5 and "train/reward" in row] == [5.5]
    events = EventAccumulator(str(tmp_path / "logs" / "r"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.5), (6, 6.5), (7, 7.5)]


def test_n07_a_run_that_was_killed_before_its_first_checkpoint_begins_its_logs_anew(tmp_path: Path) -> None:
    first = RunLogger(configuration(tmp_path))
    log(first, range(1, 4))
    first.close()
    second = RunLogger(configuration(tmp_path, resume=True))
    second.resume(0)
    log(second, range(1, 3))
    second.close()
    assert [row["step"] for row in rows(tmp_path) if "train/reward" in row] == [1, 2]


def test_n07_another_run_of_the_same_name_keeps_the_metrics_of_the_first(tmp_path: Path) -> None:
    for value in (0.0, 0.5, 0.25):
        logger = RunLogger(configuration(tmp_path))
        log(logger, range(1, 3), value=value)
        logger.close()
    files = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    assert [rows(tmp_path, name)[0]["train/reward"] for name in files] == [1.0, 1.5, 1.25]


def test_x01_metrics_that_no_run_wrote_are_refused(tmp_path: Path) -> None:
    (tmp_path / "logs" / "r").mkdir(parents=True)
    (tmp_path / "logs" / "r" / "metrics.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"metrics.jsonl' was written by no run that is recorded there"):
        RunLogger(configuration(tmp_path))
    assert (tmp_path / "logs" / "r" / "metrics.jsonl").read_text() == "mine"


class FakeWandb(types.ModuleType):
    """The package as far as it is used: runs by id, as its service keeps them. offline: it knows no summary."""

    def __init__(self, *, offline: bool) -> None:
        super().__init__("wandb")
        self.offline = offline
        self.runs: dict[str, list[dict[str, Any]]] = {}

    def Settings(self, **options: Any) -> dict[str, Any]:  # noqa: N802  wandb's name
        return options

    def Table(self, **options: Any) -> dict[str, Any]:  # noqa: N802  wandb's name
        return options

    def init(self, *, id: str, resume: str | None, **options: Any) -> Any:
        del options
        assert (resume == "allow") == (id in self.runs)
        logged = self.runs.setdefault(id, [])
        steps = [row[STEP] for row in logged if "train/reward" in row]
        summary = {} if self.offline or not steps else {STEP: steps[-1]}
        return types.SimpleNamespace(
            summary=summary, log=logged.append, define_metric=lambda *a, **k: None, finish=lambda: None
        )


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("record", [False, True])
def test_n07_weights_and_biases_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, record: bool
) -> None:
    wandb = FakeWandb(offline=offline)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    first = RunLogger(configuration(tmp_path, wandb=True))
    log(first, range(1, 6))
    first.close()
    save(tmp_path, 2, first.run_id)
    if not record:
        (tmp_path / "ckpt" / ".openrlhf-run.json").unlink()
    second = RunLogger(configuration(tmp_path, resume=True, wandb=True))
    second.resume(2)
    log(second, range(3, 8))
    second.close()
    assert list(wandb.runs) == [first.run_id]
    steps = [row[STEP] for row in wandb.runs[first.run_id] if "train/reward" in row]
    if offline and not record:  # nothing tells what was sent: what follows the checkpoint is sent again
        assert steps == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    else:
        assert steps == [1, 2, 3, 4, 5, 6, 7]
    third = RunLogger(configuration(tmp_path, wandb=True))
    third.close()
    assert third.run_id != first.run_id
    assert len(wandb.runs) == 2
