"""An engine's temporary folder: there while the engine lives, gone afterwards, swept after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from openrlhf.launcher.ray import scratch
from openrlhf.launcher.ray.scratch import Scratch, remove_stale


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch, "LONGEST_ROOT", 10_000)
    monkeypatch.setenv(scratch.ROOT_VARIABLE, str(tmp_path))
    return tmp_path


def test_l13_what_vllm_leaves_goes_with_the_engine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = Scratch()
    assert list(root.iterdir()) == [folder.path]
    folder.use()
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(folder.path)
    (folder.path / "vllm_dist_0b8e").touch()
    folder.close()
    assert list(root.iterdir()) == []


def test_a_machine_without_the_runs_folder_has_the_engines_in_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(scratch.ROOT_VARIABLE, str(root / "of the run's machine"))
    monkeypatch.setenv("TMPDIR", str(root))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = Scratch()
    assert folder.path.parent == root
    folder.close()
    assert list(root.iterdir()) == []


def test_l13_a_path_too_long_for_sockets_gives_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv(scratch.ROOT_VARIABLE, str(long))
    folder = Scratch()
    folder.close()
    assert folder.path.parent == Path("/tmp")
    assert len(f"{folder.path}/{'u' * 36}") <= 107


def test_l13_what_a_killed_process_left_is_removed_by_the_next(root: Path) -> None:
    code = (
        "import sys; from openrlhf.launcher.ray import scratch; scratch.LONGEST_ROOT = 10_000;"
        "own = scratch.Scratch(); print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        (theirs,) = root.iterdir()
        (root / "vllm-of-a-user").mkdir()  # no lock of ours in it
        remove_stale(root)
        assert theirs.is_dir()
        other.kill()
        other.wait(60)
        remove_stale(root)
    assert [p.name for p in root.iterdir()] == ["vllm-of-a-user"]
