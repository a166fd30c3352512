"""A folder in use belongs to one run, whatever ends the run."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from openrlhf.learner.folders import lock
from openrlhf.learner.folders.lock import LOCK, FolderInUseError, Holder, hold
from support import folder_writers


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, folder_writers.__file__, "holds", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_x04_a_second_live_run_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    with holder(folder) as process:
        (tmp_path / "link").symlink_to(folder)
        for path in (folder, tmp_path / "link", tmp_path / "." / "link" / ".." / "ckpt"):
            with pytest.raises(FolderInUseError) as refused:
                hold(path, "--ckpt.path")
        host = os.uname().nodename
        assert f"--ckpt.path {str(folder)!r} is in use: folder_writers.py of " in str(refused.value)
        assert f"process {process.pid} on {host}, since 20" in str(refused.value)
        assert str(refused.value).endswith("writes there. Wait for it, end it, or give another folder")
    hold(folder, "--ckpt.path").release()  # SIGKILL gave it back
    assert not folder.joinpath(LOCK).exists()


def test_x04_only_leftovers_of_dead_runs_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".openrlhf-new-0123abcd").write_text("half")
    (tmp_path / ".openrlhf-new-notes").write_text("mine")
    with holder(tmp_path):
        (tmp_path / ".openrlhf-new-deadbeef").write_text("being written")
        with pytest.raises(FolderInUseError):
            hold(tmp_path, "--ckpt.path")
        assert (tmp_path / ".openrlhf-new-deadbeef").exists()
    held = hold(tmp_path, "--ckpt.path")
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK, ".openrlhf-new-notes"]
    held.release()


def test_a_process_may_hold_a_folder_twice_and_gives_it_back_once(tmp_path: Path) -> None:
    first, second = hold(tmp_path / "a" / "b", "x"), hold(tmp_path / "a" / "." / "b", "x")
    assert first is second
    first.release()
    command = [sys.executable, folder_writers.__file__, "tries", str(tmp_path / "a" / "b")]
    assert "is in use" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    second.release()
    assert list(tmp_path.iterdir()) == []  # folders that were made for it go, too


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom openrlhf.learner.folders.lock import hold\nhold(sys.argv[1], 'x')\n"
        "child = os.fork()\nif child == 0:\n    time.sleep(60)\nprint(child, flush=True)\nos._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.wait(30)
        try:
            for _ in range(300):  # the child may not have come to its first instruction yet
                with suppress(FolderInUseError):
                    hold(tmp_path, "x").release()
                    break
                time.sleep(0.1)
            else:
                pytest.fail("the child keeps the lock")
        finally:
            os.kill(child, 9)


def mark_of(host: str) -> str:
    fields = vars(Holder.me()) | {"host": host, "boot": f"boot of {host}", "pid": 4}
    return json.dumps(fields) + "\n"


def test_x04_a_run_on_another_machine_counts_as_dead_when_it_is_silent(tmp_path: Path) -> None:
    """Where flock does not reach other machines the lock is free, and the sign of life decides."""
    path = tmp_path / LOCK
    path.write_text(mark_of("node7"))
    os.utime(path, (1.0, 1.0))
    began = time.monotonic()
    hold(tmp_path, "--ckpt.path", silence=30.0).release()
    assert time.monotonic() - began < 30.0  # long silent: nobody waits


def test_x04_a_run_on_another_machine_that_lives_is_refused(tmp_path: Path) -> None:
    path, ended = tmp_path / LOCK, threading.Event()
    path.write_text(mark_of("node7"))

    def live() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(FolderInUseError, match="process 4 on node7"):
            hold(tmp_path, "--ckpt.path", silence=20.0)
    finally:
        ended.set()
        thread.join()
    hold(tmp_path, "--ckpt.path", silence=0.3).release()  # it has died meanwhile


def test_x04_without_flock_the_sign_of_life_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(lock, "AGREEMENT", 0.01)
    monkeypatch.setattr(lock, "BEAT", 0.05)
    held = hold(tmp_path, "--ckpt.path", silence=5.0)
    lock._held.clear()  # as another process sees it
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()} on "):
        hold(tmp_path, "--ckpt.path", silence=5.0)
    held.release()
    hold(tmp_path, "--ckpt.path", silence=5.0).release()


def test_a_lock_file_of_somebody_else_and_places_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / LOCK).write_text("a file of mine")
    with pytest.raises(ValueError, match="is not what a run writes there: move it away"):
        hold(tmp_path / "a", "--ckpt.path")
    assert (tmp_path / "a" / LOCK).read_text() == "a file of mine"
    with pytest.raises(ValueError, match=r"--ckpt.path .* cannot be written: Not a directory"):
        hold(tmp_path / "a" / LOCK / "b", "--ckpt.path")
    with pytest.raises(ValueError, match=r"--ckpt.path '/proc/x' cannot be written"):
        hold("/proc/x", "--ckpt.path")
