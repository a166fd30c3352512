"""Runs on the cluster of the tests, started with the command line, and what is left of them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.launcher.ray.leftovers import NODE_VARIABLE as MARK
from openrlhf.launcher.slurm.states import JobState, wait_for
from support.mini_slurm import MiniSlurm

TRAINER = Path(__file__).parent / "slurm_trainer.py"
BIN = Path(sys.executable).parent


@dataclass
class Desk:
    """Where a user works: a folder of their own for logs, checkpoints and notes."""

    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / "logs dir"

    @property
    def notes(self) -> Path:
        """What a counting stand-in writes: a line per life, one at the end."""
        return self.folder / "notes"

    @property
    def flags(self) -> list[str]:
        """Flags that fit together for one GPU; nothing that they name exists."""
        flags = {"actor.model_name_or_path": "m", "data.prompt_dataset": "p", "reward.remote_url": "r.py"}
        flags |= {"vllm.num_engines": "1", "actor.num_gpus_per_node": "1", "algo.kl.init_coef": "0"}
        flags |= {"algo.advantage.estimator": "reinforce", "rollout.n_samples_per_prompt": "1"}
        flags["ckpt.path"] = str(self.folder / "checkpoints")
        return [word for name, value in flags.items() for word in (f"--{name}", value)]

    def stand_in(self) -> str:
        """An interpreter that runs the stand-in instead of the trainer, and everything else as Python does."""
        path = self.folder / "python"
        trainer = f'exec {sys.executable} {TRAINER} "$@"'
        path.write_text(
            f'#!/bin/sh\nif [ "$2" = openrlhf.cli.train_ppo_ray ]; then shift 2; {trainer}; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return str(path)

    def submit(self, what: str, *options: str, flags: Sequence[str] = ()) -> str:
        """`openrlhf-launch slurm` with the stand-in doing `what`; the job's id."""
        words = ["--python", self.stand_in(), "--env", f"STAND_IN={what}", *options]
        return self.launch("slurm", *words, "--parsable", "--", *self.flags, *flags).stdout.strip()

    def launch(self, *words: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """`openrlhf-launch`, with the log folder of this desk."""
        command = [str(BIN / "openrlhf-launch"), words[0], "--log-dir", str(self.logs), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=self.folder)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def log(self, job: str, node: int = 0) -> str:
        path = self.logs / job / f"{job}_{node}_log.out"
        return path.read_text() if path.exists() else ""

    def end(self, job: str) -> JobState:
        """The state in which the job ended; its logs are printed for a failing test."""
        (state,) = wait_for(job, pause=0.5, longest=1.0)
        for path in sorted((self.logs / job).glob("*.out")):
            print(f"--- {path.name}\n{path.read_text()[-6000:]}")
        return state


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something that must happen in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.3)


def left_over(cluster: MiniSlurm, job: str) -> list[str]:
    """Processes and folders of a job that still exist on any node."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={job}.".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
        except OSError:
            continue
    return found + [str(path) for path in [*cluster.local_files(), *Path("/tmp").iterdir()] if path.name == f"r{job}"]


def exposed(secrets: Iterable[str], places: Iterable[Path]) -> list[str]:
    """Where another user could read one of these values: in command lines, and in files below `places` for everybody.

    Folders below them that are for their owner alone are not entered; the places themselves are, whatever their mode.
    """
    values = [value.encode() for value in secrets]
    lines = [entry / "cmdline" for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = []
    tops = [top for place in places for top in (place.iterdir() if place.is_dir() else [place])]
    for path in [*lines, *(file for top in tops for file in _open_files(top))]:
        try:
            if any(value in path.read_bytes() for value in values):
                found.append(str(path))
        except OSError:
            continue
    return found


def _open_files(place: Path) -> Iterator[Path]:
    """A file, or those below a folder, that others may read."""
    try:
        mode = place.lstat().st_mode
        if not mode & 0o004 or stat.S_ISLNK(mode):
            return
        if stat.S_ISREG(mode):
            yield place
        elif stat.S_ISDIR(mode) and mode & 0o001:
            for child in place.iterdir():
                yield from _open_files(child)
    except OSError:
        return


def scancel(*words: str) -> None:
    subprocess.run(["scancel", *words], check=True, timeout=60, env=os.environ)


def cancel_all() -> None:
    """End every job of the cluster."""
    scancel(f"--user={os.getuid()}")
