"""Starts a program, and its tests, under a supervisor, and collects how it went.

The environment of the program holds a path, a home and the text encoding, nothing of ours. `isolation` says what else
keeps it apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from openrlhf.agents.graders.program.blocks import offered_names
from openrlhf.agents.graders.program.isolation import HERE, MACHINE, SOURCE, isolation, readable, wrapper

MEGABYTE = 2**20
OUTPUT_BYTES = 64 * 1024  # kept of a program's output
FILES = 1000  # that a program may write; together they may have four times the size of one
NOWHERE = "/nonexistent"
START_SECONDS = 60.0  # for starting and ending a run on a busy machine


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeLimits:
    """seconds: wall clock and CPU of one run. memory_mb: address space of a process, half of what all of them may hold
    together. file_mb: largest file it may write, a quarter of all its files. processes: how many it may have at a time.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeResult:
    """One run. exit_code None: it was killed at the time limit; negative: killed by that signal, at other limits.

    isolation: what kept the program apart ("bubblewrap", "landlock", "none").
    """

    exit_code: int | None
    stdout: str
    stderr: str
    isolation: str = "none"

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


def run(source: str, stdin: str, tests: str | None, limits: CodeLimits, output_bytes: int = OUTPUT_BYTES) -> CodeResult:
    """One run in an empty folder: of the program by itself, or of its tests. Never raises for what either does.

    tests: Python source that calls the program; it stands in a process that the program cannot reach. output_bytes:
    kept of what it prints.
    """
    if os.name != "posix":
        raise OSError("programs are run on POSIX systems only: start the grader on Linux or macOS")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder())
        path = os.path.join(folder, "program.py")
        with open(path, "wb") as file:
            file.write(source.removeprefix("\ufeff").encode("utf-8", "surrogatepass"))
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        given = stack.enter_context(_file(stdin))
        asked = stack.enter_context(_file(tests or ""))
        description = _description(source, path, tests is not None, limits)
        code, reason = _supervised(description, given, asked, out, err)
        notes = f"\n[ended: {reason}]\n" if reason else ""
        kept = str(description["isolation"])
        return CodeResult(
            exit_code=code, stdout=_read(out, output_bytes), stderr=_read(err, OUTPUT_BYTES) + notes, isolation=kept
        )


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder that is gone afterwards, however deep and closed what a program made in it is."""
    folder = tempfile.mkdtemp(prefix="code-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            _remove(folder)


def _remove(folder: str) -> None:
    """Moves what is in folders up, so that no path gets long and nothing recurses (`shutil.rmtree` does)."""
    if os.path.islink(folder):  # where nothing keeps a program from its folder's parent
        os.unlink(folder)
        return
    left, mark = [folder], os.urandom(8).hex()
    for place in left:
        os.chmod(place, 0o700)
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False):
                left.append(os.path.join(folder, f"{mark}-{len(left)}"))
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, left[-1])
            else:
                os.unlink(entry.path)
    for place in left[1:]:
        os.rmdir(place)
    os.rmdir(folder)


def _description(source: str, path: str, tested: bool, limits: CodeLimits) -> dict[str, object]:
    names = offered_names(source)
    runner = [sys.executable, "-P", str(HERE / "runner.py")]
    plain = [sys.executable, os.path.basename(path)]
    mode = "serve" if tested else "main"
    folder, kind = os.path.dirname(path), isolation()
    return {
        "command": [*runner, mode, os.path.basename(path), *names] if tested or names else plain,
        "judge": [sys.executable, "-P", "-s", "-m", "openrlhf.agents.graders.program.judge"] if tested else None,
        "folder": folder,
        "environment": _environment(folder),
        "judge_environment": _environment(NOWHERE),  # its home must not be one that the program fills
        "seconds": limits.seconds,
        "cpu": max(1, int(limits.seconds + 0.999)),
        "memory": limits.memory_mb * MEGABYTE,
        "memory_total": 2 * limits.memory_mb * MEGABYTE,
        "file": limits.file_mb * MEGABYTE,
        "folder_bytes": 4 * limits.file_mb * MEGABYTE,
        "files": FILES,
        "processes": limits.processes,
        "isolation": kind,
        "wrapper": wrapper(kind, folder),
        "readable": [*readable(), *MACHINE],
        "source": SOURCE,
    }


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours but the path: our environment may hold keys."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _supervised(
    description: dict[str, object], given: IO[bytes], asked: IO[bytes], out: IO[bytes], err: IO[bytes]
) -> tuple[int | None, str]:
    """The exit code, and the limit that ended the run."""
    receiver, sender = os.pipe()
    said = b""
    try:
        description |= {"report": sender, "tests": asked.fileno()}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "supervisor.py"), json.dumps(description)],
            stdin=given,
            stdout=out,
            stderr=err,
            cwd=str(description["folder"]),
            env=_environment(str(description["folder"])),
            pass_fds=(sender, asked.fileno()),
            start_new_session=True,
        )
        seconds = description["seconds"]
        assert isinstance(seconds, float | int)
        try:
            process.wait(seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            return None, "its supervisor did not end"
        finally:
            _end(process)
        os.set_blocking(receiver, False)  # a process forked meanwhile may hold the other end open
        with contextlib.suppress(BlockingIOError):
            said = os.read(receiver, 1 << 16)
    finally:
        os.close(sender)
        os.close(receiver)
    if not said:
        return process.returncode or 1, "its supervisor ended"
    ended = json.loads(said)
    return ended["code"], ended["reason"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Where the supervisor is still there (it is late, or we are interrupted) it ends what it started, then itself."""
    process.terminate()
    try:
        process.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _file(text: str) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (its caller closes it)
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def _read(file: IO[bytes], count: int) -> str:
    file.seek(0)
    return file.read(count).decode("utf-8", "replace")
