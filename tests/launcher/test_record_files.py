"""What is recorded is read back exactly, whatever a kill leaves; a record stays within its room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.types import StopReason, Turn
from openrlhf.launcher.record.files import ABOUT, SAMPLES, STEPS, step_files
from openrlhf.launcher.record.place import RecordPlace
from openrlhf.launcher.record.reader import Record, find_records
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.record.sample_writer import SampleWriter, image_name
from openrlhf.launcher.record.schema import RecordedSample, samples_of, table_of
from support.recorded import GIB, many_samples, sample, write_record


def same(one: RecordedSample, other: RecordedSample) -> bool:
    for name in RecordedSample.__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        elif a != b and list(a) != list(b):
            return False
    return True


@st.composite
def drawn_samples(draw: st.DrawFn) -> RecordedSample:
    mask = np.array(draw(st.lists(st.booleans(), max_size=9)), dtype=bool)
    n = len(mask)
    floats = st.lists(st.floats(width=32, allow_nan=False), min_size=n, max_size=n)

    def masked() -> np.ndarray:
        return np.where(mask, np.array(draw(floats), dtype=np.float32), np.float32(0)).astype(np.float32)

    return sample(
        1,
        draw(st.integers(0, 999)),
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), dtype=np.int32),
        trainable=mask,
        engine_logprobs=masked(),
        trainer_logprobs=draw(st.sampled_from([None, masked()])),
        advantages=masked(),
        versions=np.where(mask, draw(st.integers(0, 99)), -1).astype(np.int32),
        prompt=draw(st.text(max_size=5)),
        label=draw(st.sampled_from(["ä", None, 3, {"a": [1.5, None]}, [True]])),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        score=draw(st.none() | st.floats(allow_nan=False)),
        shaped=draw(st.floats(allow_nan=False)),
        extra_logs=draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=2)),
        turns=[Turn(start=0, end=n, finish_reason="stop")],
        stop_reason=draw(st.sampled_from(list(StopReason))),
        images=draw(st.lists(st.sampled_from(["a", "b"]), max_size=2)),
    )


@given(st.lists(drawn_samples(), max_size=4))
def test_samples_come_back_bit_for_bit(samples: list[RecordedSample]) -> None:
    back = samples_of(table_of(samples))
    assert len(back) == len(samples)
    assert all(same(a, b) for a, b in zip(samples, back, strict=True))


def test_a_whole_record(tmp_path: Path) -> None:
    record = Record.open(write_record(tmp_path / "run", steps=3, ranks=2))
    assert record.complete_steps() == [1, 2, 3]
    groups = record.groups(2)
    assert [g.group_id for g in groups] == ["e0-p0", "e0-p1"]
    assert [list(g.samples) for g in groups] == [[0, 1], [0, 1]]
    assert [s.reward for s in groups[1].samples.values()] == [0.0, 1.0]
    assert groups[0].others[2]["failure"].startswith("reward: boom")
    assert groups[0].count == 3
    assert same(groups[1].samples[1], sample(2, 3, group=1, place=1))
    assert record.steps()[2].metrics == {"train/reward": 0.5, "timing/step_total": 1.0}
    assert record.steps()[2].sampling == {"rollout/failed_samples": 2.0}
    assert record.evaluations() == {3: {"eval/eval_default_pass1": 0.5}}
    assert [a["name"] for a in record.alarms()] == ["no_reward_variance"]
    tokens = groups[0].samples[0].tokens
    assert record.decode(tokens).startswith("sort 312 ")
    assert "".join(record.pieces(tokens)) == record.decode(tokens)
    assert len(record.pieces(tokens)) == len(tokens)


def test_a_trajectory_is_what_the_ranks_train_on() -> None:
    trajectory = sample(1, 0, place=1).trajectory([b"png"])
    assert trajectory.logprobs == sample(1, 0, place=1).engine_logprobs.tolist()
    assert trajectory.trainable == [0] * 9 + [1] * 4
    assert (trajectory.reward, trajectory.group_id, trajectory.sample_index) == (1.0, "e0-p0", 1)
    assert trajectory.images == [b"png"]


def test_the_newest_of_several_records_is_opened(tmp_path: Path) -> None:
    for age, name in enumerate(("old", "new")):
        os.utime(write_record(tmp_path / "logs" / name / "record") / ABOUT, (age, age))
    assert [path.parent.name for path in find_records(tmp_path)] == ["old", "new"]
    assert Record.open(tmp_path).folder.parent.name == "new"


def test_no_record_and_a_later_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no record of a run: there is no record\.json"):
        Record.open(tmp_path)
    (tmp_path / ABOUT).write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="was written by a later version"):
        Record.open(tmp_path)


def test_the_oldest_steps_go(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", steps=1)
    size = (folder / SAMPLES / "00000001.rank0.parquet").stat().st_size
    writer = SampleWriter(RecordPlace(folder=folder, max_bytes=3 * size + size // 2), 0)
    for step in range(2, 8):
        writer.write(step, [sample(step, i, group=i // 2, place=i % 2) for i in range(4)], {})
    assert [file.step for file in step_files(folder / SAMPLES)] == [5, 6, 7]
    assert Record.open(folder).steps().keys() == {1}
    tiny = SampleWriter(RecordPlace(folder=folder, max_bytes=1), 0)
    tiny.write(8, [sample(8, 0)], {})
    assert [file.step for file in step_files(folder / SAMPLES)] == [8]


def test_images_are_kept_by_content_and_go_with_their_step(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", steps=0)
    contents = {image_name(b"one"): b"one" * 1000, image_name(b"two"): b"two" * 1000}
    writer = SampleWriter(RecordPlace(folder=folder, max_bytes=1), 0)
    for step in (1, 2):
        writer.write(step, [sample(step, 0, images=list(contents))], contents)
    record = Record.open(folder)
    assert record.images(1) == {}
    assert record.images(2) == contents
    assert record.samples(2)[0].images == list(contents)


def test_a_run_that_goes_on_replaces_what_it_does_again(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", steps=4)
    with (folder / STEPS).open("a") as file:
        file.write('{"step":5,"gro')
    record = RunRecord(folder, run="ab12", name="run", ranks=1, goes_on=True, config_toml="")
    record.resume(2)
    assert Record.open(folder).complete_steps() == [1, 2]
    assert list(Record.open(folder).steps()) == [1, 2]
    assert Record.open(folder).alarms() == []


def test_an_earlier_record_of_the_same_name_steps_aside(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", steps=2)
    write_record(folder, steps=1)
    assert Record.open(tmp_path / "run.1").complete_steps() == [1, 2]
    assert Record(folder).complete_steps() == [1]


def test_a_folder_with_files_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(ValueError, match=r"config\.toml' was written by no run: move it away"):
        RunRecord(tmp_path, run="a", name="b", ranks=1, goes_on=False, config_toml="")
    assert (tmp_path / "config.toml").read_text() == "mine"


def test_a_rank_that_does_not_see_the_record_of_the_trainer_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SampleWriter(RecordPlace(folder=tmp_path, max_bytes=GIB), 0).write(1, [sample(1, 0)], {})
    assert "--logger.record_dir must be a folder that all nodes share" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ABOUT).write_text("{}")
    (tmp_path / SAMPLES).write_text("a file where the folder should be")
    writer = SampleWriter(RecordPlace(folder=tmp_path, max_bytes=GIB), 0)
    for step in (1, 2):
        writer.write(step, [sample(step, 0)], {})
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == ["step 1 was not recorded"]


def test_a_record_is_readable_after_every_kill(tmp_path: Path) -> None:
    """20 writers, each killed at another moment of its work."""
    folders = [tmp_path / f"run{number}" for number in range(20)]
    program = "import sys; from support.recorded import kill_writers; kill_writers(sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program, *map(str, folders)], env=environment, check=True, timeout=120)
    for folder in folders:
        record = Record.open(folder)
        assert len(record.steps()) == 1
        assert len(step_files(folder / SAMPLES)) >= 3
        for file in step_files(folder / SAMPLES)[1:]:
            there = record.samples(file.step)
            assert all(same(a, b) for a, b in zip(many_samples(file.step), there, strict=True))
        SampleWriter(RecordPlace(folder=folder, max_bytes=GIB), 0)
        assert not list((folder / SAMPLES).glob(".new-*"))
