"""Checkpoints are complete or absent, and rotated by count, size and metric."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openrlhf.learner.checkpoint_dir import OLD, TEMPORARY, CheckpointStore
from support import learner_saver


def save(store: CheckpointStore, step: int, *, metric: float | None = None, size: int = 10) -> Path:
    pending = store.begin(step)
    (pending / "data").write_bytes(b"x" * size)
    return store.commit(step, metric=metric)


def steps(store: CheckpointStore) -> list[int]:
    return [c.step for c in store.checkpoints()]


def latest_step(store: CheckpointStore) -> int:
    latest = store.latest()
    assert latest is not None
    return latest.step


def test_commit_makes_a_checkpoint_and_points_at_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "ckpt")
    path = save(store, 7, metric=0.5)
    assert path == tmp_path / "ckpt" / "global_step7"
    assert (tmp_path / "ckpt" / "latest").read_text() == "global_step7\n"
    assert json.loads((path / "metric.json").read_text()) == {"step": 7, "metric": 0.5}
    assert latest_step(store) == 7


def test_empty_folder_has_no_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.latest() is None
    assert store.best() is None


def test_unfinished_checkpoint_is_invisible_and_cleaned_up(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.begin(2) / "data").write_bytes(b"half")
    assert steps(CheckpointStore(tmp_path)) == [1]
    save(CheckpointStore(tmp_path), 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step1", "global_step3", "latest"]


def test_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, size=10)
    path = save(store, 1, size=20)
    assert (path / "data").stat().st_size == 20
    assert steps(store) == [1]


def test_oldest_goes_first_by_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=2)
    for step in (1, 2, 3, 10):
        save(store, step)
    assert steps(store) == [3, 10]


def test_best_is_kept_beside_the_count(tmp_path: Path) -> None:
    # B118
    store = CheckpointStore(tmp_path, max_num=1)
    for step, metric in ((1, 0.9), (2, 0.1), (3, 0.5)):
        save(store, step, metric=metric)
    assert steps(store) == [1, 3]
    best = store.best()
    assert best is not None
    assert best.step == 1


def test_without_metric_goes_before_worst_metric_before_oldest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=3)
    for step, metric in ((1, 0.5), (2, 0.9), (3, None), (4, 0.2)):
        save(store, step, metric=metric)
    assert steps(store) == [1, 2, 3, 4]  # the best does not count
    save(store, 5, metric=0.3)
    assert steps(store) == [1, 2, 4, 5]
    save(store, 6, metric=0.3)
    assert steps(store) == [1, 2, 5, 6]


def test_size_limit_spares_best_and_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=10, max_bytes=250)
    save(store, 1, metric=1.0, size=1000)
    save(store, 2, size=1000)
    save(store, 3, size=1000)
    assert steps(store) == [1, 3]


def test_keeping_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`store\.max_num`"):
        CheckpointStore(tmp_path, max_num=0)


def test_lost_pointer_falls_back_to_the_highest_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 9)
    save(store, 10)
    (tmp_path / "latest").unlink()
    assert latest_step(store) == 10


def test_x01_files_of_the_user_stay_when_a_checkpoint_is_replaced_or_rotated_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_num=1)
    for again in range(2):  # the second time in the place of the first
        (save(store, 1, size=10 + again) / "notes.md").write_text("mine")
    assert (tmp_path / "global_step1" / "data").stat().st_size == 11
    save(store, 2)
    assert steps(store) == [2]
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.glob("global_step1/*")] == ["global_step1/notes.md"]
    with pytest.raises(ValueError, match=r"/global_step1' has the name of a checkpoint and holds what no run wrote"):
        store.check()
    store.check(resume=True)


@pytest.mark.parametrize("recorded", [True, False])
def test_x01_what_had_stepped_aside_comes_back(tmp_path: Path, recorded: bool) -> None:
    """A file system that cannot swap two names: a kill between two renames."""
    store = CheckpointStore(tmp_path)
    if recorded:
        save(store, 1)
    (tmp_path / "global_step1").mkdir(exist_ok=True)
    (tmp_path / "global_step1" / "notes.md").write_text("mine")
    (tmp_path / "global_step1").rename(tmp_path / f"{OLD}global_step1")
    assert steps(store) == ([1] if recorded else [])  # found there, too
    store.recover()
    assert (tmp_path / "global_step1" / "notes.md").read_text() == "mine"
    assert steps(store) == ([1] if recorded else [])


@pytest.mark.parametrize("prefix", [OLD, TEMPORARY])
def test_x01_a_folder_of_the_user_whose_place_was_taken_blocks_no_later_save(tmp_path: Path, prefix: str) -> None:
    """A kill after a checkpoint took the place of a folder with notes alone, and before their second names went."""
    store = CheckpointStore(tmp_path)
    (save(store, 1) / "state").mkdir()
    (tmp_path / "global_step1" / "state" / "notes.md").write_text("mine")
    (tmp_path / f"{prefix}global_step1" / "state").mkdir(parents=True)
    (tmp_path / f"{prefix}global_step1" / "state" / "notes.md").hardlink_to(
        tmp_path / "global_step1" / "state" / "notes.md"
    )
    (tmp_path / f"{TEMPORARY}global_step3").mkdir()
    (tmp_path / f"{TEMPORARY}global_step3" / f"{TEMPORARY}0123abcd").write_text("half a manifest")
    save(store, 1)
    assert (tmp_path / "global_step1" / "state" / "notes.md").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step1", "latest"]


def check_kills_while_saving(root: Path, delays: list[float]) -> None:
    """After every kill the newest checkpoint is whole, and no older than the last one reported."""
    store, seen = CheckpointStore(root, max_num=2), 0
    for delay in delays:
        with subprocess.Popen(
            [sys.executable, learner_saver.__file__, str(root), str(seen + 1)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            seen = int(process.stdout.readline())
            time.sleep(delay)
            process.kill()
            reported = [int(line) for line in process.stdout if line.endswith("\n")]
        seen = max([seen, *reported])
        latest = store.latest()
        assert latest is not None
        assert latest.step >= seen
        files = list(latest.path.rglob("*.bin"))
        assert len(files) == learner_saver.FILES
        want = latest.step.to_bytes(4, "big") * learner_saver.SIZE
        assert all(p.read_bytes() == want for p in files)
        seen = latest.step
    assert all(p.name.startswith((TEMPORARY, "global_step", "latest")) for p in root.iterdir())


def test_kill_during_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    # B117
    rng = random.Random(0)
    check_kills_while_saving(tmp_path, [rng.uniform(0.0, 0.2) for _ in range(3)])


@pytest.mark.proof
def test_kill_at_fifty_moments(tmp_path: Path) -> None:
    rng = random.Random(1)
    check_kills_while_saving(tmp_path, [rng.uniform(0.0, 0.3) for _ in range(50)])
