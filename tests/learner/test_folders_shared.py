"""Whether other processes see a folder, and the files that they wrote."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from openrlhf.learner import checkpoint_dir
from openrlhf.learner.checkpoint_dir import CheckpointStore
from openrlhf.learner.folders.shared import PATIENCE, mark, missing, named, sees, sizes_below, together


def test_a_mark_is_there_as_long_as_it_is_needed(tmp_path: Path) -> None:
    with mark(tmp_path) as name:
        assert sees(tmp_path / name)
        assert not sees(tmp_path / "other" / name, patience=0.0)
    assert list(tmp_path.iterdir()) == []


def test_what_arrives_late_is_seen(tmp_path: Path) -> None:
    late = threading.Timer(0.3, (tmp_path / "late").write_bytes, [b"whole"])
    late.start()
    assert missing(tmp_path, {"late": 5}) == []
    late.join()
    assert missing(tmp_path, {"late": 6, "never": 0}, patience=0.0) == ["late", "never"]
    assert PATIENCE >= 5


def test_files_of_several_processes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rank0").write_bytes(b"123")
    (tmp_path / "rank1").write_bytes(b"1")
    assert sizes_below(tmp_path) == {"a/rank0": 3, "rank1": 1}
    assert together([{"x": 3, "y": 0}, {"y": 2}, {}], "actor") == {"actor/x": 3, "actor/y": 2}
    assert named(list("abcde")) == "a, b, c and 2 more"


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_checkpoint_in_pieces_is_none_and_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """What another node has on a disk of its own: of three files this one sees so many."""
    monkeypatch.setattr(checkpoint_dir, "missing", lambda *args: missing(*args, patience=0.0))
    store = CheckpointStore(tmp_path, max_num=1)
    (store.begin(1) / "whole").write_bytes(b"1")
    store.commit(1, written={"whole": 1})
    pending = store.begin(2)
    for number in range(kept):
        (pending / f"rank{number}").write_bytes(b"12")
    (pending / "rank2").write_bytes(b"1")  # cut short
    with pytest.raises(ValueError, match=rf"step 2 is not whole: ranks wrote rank{kept}.*all nodes share"):
        store.commit(2, written={f"rank{number}": 2 for number in range(3)})
    newest = store.latest()
    assert newest is not None
    assert newest.step == 1
    assert [path.name for path in store.unfinished()] == [pending.name]
    (store.begin(2) / "rank0").write_bytes(b"12")
    assert store.commit(2, written={"rank0": 2}).name == "global_step2"
