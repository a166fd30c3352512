"""Exports put their own files into a folder and leave the rest, whatever the folder is and whenever they are killed."""

from __future__ import annotations

import ctypes
import os
import random
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.learner.folders.lock import hold
from openrlhf.learner.folders.manifest import MANIFEST, Manifest
from openrlhf.learner.folders.publish import in_the_way, publish, recover, write_text
from openrlhf.learner.folders.trial import try_folder
from support import folder_writers
from support.folder_writers import NAMES, write_model

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
Mount = Callable[..., None]
"""mount(source, target, kind, flags, data)"""


def tree(folder: Path) -> dict[str, str]:
    """All files but our book-keeping, with their content."""
    names = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    return {name: (folder / name).read_text() for name in names if "/.openrlhf-" not in f"/{name}"}


def export(folder: Path, version: int) -> None:
    with publish(folder) as fresh:
        write_model(fresh, version)


def model(version: int) -> dict[str, str]:
    return {name: f"{name} {version}" for name in NAMES} | {f"part{version % 3}-0.bin": f"part {version}"}


def test_x01_an_export_leaves_notes_checkpoints_and_other_models_alone(tmp_path: Path) -> None:
    users = {
        "notes.md": "mine",
        "ckpt/global_step5/actor/w.bin": "weights",
        "ema/why.txt": "mine",
        "other/config.json": "{}",
    }
    for name, text in users.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for version in (1, 2, 3):  # later versions replace the files of earlier ones, and remove those that they lack
        export(tmp_path, version)
        assert tree(tmp_path) == users | model(version)
    assert set(Manifest.read(tmp_path).files) == set(model(3))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".openrlhf-")] == [MANIFEST]


@pytest.mark.parametrize(
    "theirs",
    ["config.json", "ema/config.json", "model-00001-of-00002.safetensors", "adapter_config.json", "pytorch_model.bin"],
)
def test_x01_what_no_run_wrote_is_refused_at_the_start(tmp_path: Path, theirs: str) -> None:
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("a model of somebody else")
    with pytest.raises(ValueError, match=rf"--ckpt.output_dir .* holds files that no run wrote.*: {theirs}"):  # noqa: SIM117
        with publish(tmp_path, trial=True, name="--ckpt.output_dir") as fresh:
            write_model(fresh, 1)
    assert tree(tmp_path) == {theirs: "a model of somebody else"}


def test_x01_a_file_that_its_user_changed_is_the_users(tmp_path: Path) -> None:
    export(tmp_path, 1)
    (tmp_path / "config.json").write_text("tuned")
    (tmp_path / "part1-0.bin").write_text("mine now")
    assert in_the_way(tmp_path, ["config.json"]) == ["config.json"]
    export(tmp_path, 2)  # its place was taken while it was trained: a folder of its own, and nothing is lost
    assert tree(tmp_path / "export1") == model(2)
    kept = {k: v for k, v in tree(tmp_path).items() if not k.startswith("export1/")}
    assert kept == model(1) | {"config.json": "tuned", "part1-0.bin": "mine now"}


def test_a_trial_leaves_nothing(tmp_path: Path) -> None:
    with publish(tmp_path / "a" / "b", trial=True) as fresh:
        write_model(fresh, 1)
    assert list(tmp_path.iterdir()) == []
    export(tmp_path, 1)
    before = tree(tmp_path)
    with publish(tmp_path, trial=True) as fresh:
        write_model(fresh, 2)
    assert tree(tmp_path) == before


def _fail(folder: Path) -> None:
    with publish(folder) as fresh:
        (fresh / "config.json").write_text("2")
        raise OSError("disk full")


def test_an_error_leaves_the_earlier_export(tmp_path: Path) -> None:
    export(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        _fail(tmp_path)
    assert tree(tmp_path) == model(1)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".openrlhf-")] == [MANIFEST]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_x07_modes_are_those_of_the_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        with publish(tmp_path / "m") as fresh:
            write_model(fresh, 1)
            for path in (fresh / "model.safetensors", fresh / "ema" / "config.json"):
                path.chmod(0o600)  # as safetensors leaves them
            (fresh / "ema").chmod(0o700)
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "m").rglob("*") if p.is_file()}
    assert modes == {0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "m" / "ema").stat().st_mode) == 0o777 & ~umask


def test_x02_a_link_stays_a_link_and_is_written_into(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "out").symlink_to(scratch)
    for version in (1, 2):
        export(tmp_path / "out", version)
    assert (tmp_path / "out").is_symlink()
    assert tree(scratch) == model(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "scratch"]


@pytest.fixture
def mounts() -> ctypes.CDLL:
    """A mount namespace of this test's thread, where it may mount what it likes; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    return libc


def in_own_mounts(libc: ctypes.CDLL, body: Callable[[Mount], None]) -> None:
    """Run `body(mount)` in a thread with mounts of its own; skipped where that is not allowed."""
    outcome: list[BaseException | None] = []

    def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
        done = libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, data.encode())
        if done != 0:
            raise OSError(ctypes.get_errno(), f"mount {kind} at {target}")

    def run() -> None:
        try:
            if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
                outcome.append(PermissionError(ctypes.get_errno(), "unshare"))
                return
            body(mount)
            outcome.append(None)
        except BaseException as error:  # handed to the test
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], PermissionError):
        pytest.skip(f"no mounts here: {outcome[0]}")
    if outcome[0] is not None:
        raise outcome[0]


def test_x02_a_mount_point_is_written_into(tmp_path: Path, mounts: ctypes.CDLL) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def body(mount: Mount) -> None:
        mount("tmpfs", out, "tmpfs")
        (out / "ema").mkdir()
        mount("tmpfs", out / "ema", "tmpfs")  # a disk in the disk
        for version in (1, 2):
            try_folder(out, "--ckpt.output_dir")
            export(out, version)
            assert tree(out) == model(version)
        assert os.path.ismount(out)
        assert os.path.ismount(out / "ema")

    in_own_mounts(mounts, body)
    assert list(out.iterdir()) == []  # all of it went into the mount


def test_x02_a_full_disk_is_found_and_the_earlier_export_stays(tmp_path: Path, mounts: ctypes.CDLL) -> None:
    def body(mount: Mount) -> None:
        mount("tmpfs", tmp_path, "tmpfs", 0, "size=512k")
        export(tmp_path, 1)
        with pytest.raises(ValueError, match=r"GiB are free on its disk, the run will write 1 GiB there"):
            try_folder(tmp_path, "--ckpt.output_dir", room=1 << 30)
        for trial in (True, False):
            with pytest.raises(OSError, match="No space left"), publish(tmp_path, trial=trial) as fresh:
                (fresh / "model.safetensors").write_bytes(b"x" * (1 << 20))
            assert tree(tmp_path) == model(1)
        (tmp_path / "filler").write_bytes(b"x" * (os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize))
        with pytest.raises(ValueError, match=r"--ckpt.path .* cannot be written: No space left"):
            try_folder(tmp_path, "--ckpt.path")

    in_own_mounts(mounts, body)


def test_x02_what_cannot_be_written_is_found(tmp_path: Path, mounts: ctypes.CDLL) -> None:
    def body(mount: Mount) -> None:
        mount("tmpfs", tmp_path, "tmpfs", 1)  # read-only
        with pytest.raises(ValueError, match=r"--ckpt.output_dir .* cannot be written: Read-only file system"):
            try_folder(tmp_path, "--ckpt.output_dir")

    in_own_mounts(mounts, body)


def run_writer(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, folder_writers.__file__, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_x01_an_export_killed_before_any_of_its_steps_is_finished_or_absent(tmp_path: Path) -> None:
    """After a kill a reader finds the old model, none, or the new one; after the next start never a mixture."""
    step, finished, seen = 0, False, set()
    while not finished:
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / "notes.md").write_text("mine")
        export(folder, 1)
        finished = "done" in run_writer("stopped", folder, 2, step).stdout
        left = tree(folder)
        assert left.pop("notes.md") == "mine"
        if "config.json" in left:
            assert left in (model(1), model(2))
        hold(folder, "--ckpt.output_dir").release()
        recover(folder)
        left = tree(folder)
        assert left.pop("notes.md") == "mine"
        assert left in (model(1), model(2))
        seen.add(left["config.json"])
        assert [p.name for p in folder.iterdir() if p.name.startswith(".openrlhf-")] == [MANIFEST]
        step += 1 if step > 14 else 3
    assert seen == {"config.json 1", "config.json 2"}
    assert step > 15


def check_kills(folder: Path, delays: list[float]) -> None:
    (folder / "ema").mkdir()
    (folder / "ema" / "mine.txt").write_text("mine")
    seen = 0
    for delay in delays:
        with subprocess.Popen(
            [sys.executable, folder_writers.__file__, "exports", str(folder), str(seen + 1)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            seen = int(process.stdout.readline())
            time.sleep(delay)
            process.kill()
            reported = [int(line) for line in process.stdout if line.endswith("\n")]
        seen = max([seen, *reported])
        recover(folder)
        left = tree(folder)
        assert left.pop("ema/mine.txt") == "mine"
        version = int(left["config.json"].split()[1])
        assert version in (seen, seen + 1)
        assert set(left.values()) == {f"{name} {version}" for name in NAMES} | {f"part {version}"}
        seen = version


def test_x01_kills_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(0)
    check_kills(tmp_path, [rng.uniform(0.0, 0.2) for _ in range(3)])


@pytest.mark.proof
def test_x01_kills_at_sixty_moments(tmp_path: Path) -> None:
    rng = random.Random(1)
    check_kills(tmp_path, [rng.uniform(0.0, 0.3) for _ in range(60)])


def test_a_text_goes_under_a_free_name_and_is_replaced_only_while_ours(tmp_path: Path) -> None:
    names = ("config.toml", "openrlhf_config.toml")
    assert write_text(tmp_path, names, "1", part="run").name == "config.toml"
    assert write_text(tmp_path, names, "2", part="run").name == "config.toml"
    (tmp_path / "config.toml").write_text("the user's")
    assert write_text(tmp_path, names, "3", part="run").name == "openrlhf_config.toml"
    assert (tmp_path / "config.toml").read_text() == "the user's"
    export(tmp_path, 1)  # an export replaces only what exports wrote
    assert (tmp_path / "openrlhf_config.toml").read_text() == "3"
    (tmp_path / "openrlhf_config.toml").write_text("the user's, too")
    with pytest.raises(ValueError, match=r"config.toml and openrlhf_config.toml that no run wrote"):
        write_text(tmp_path, names, "4", part="run")


def test_a_manifest_of_somebody_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(ValueError, match="is not what a run writes there: move it away"):
        export(tmp_path, 1)
