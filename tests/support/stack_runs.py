"""Real runs of the command line in processes of their own, on a tiny random model."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf.launcher.ray.leftovers import RUN_ID_VARIABLE

REWARD = '''
def reward_func(queries, prompts, labels):
    """Share of digits in the answer: a random model gets something."""
    answers = [q[len(p):] for q, p in zip(queries, prompts)]
    return {"rewards": [sum(c.isdigit() for c in a) / 10 for a in answers]}
'''

MARK = "OPENRLHF_TEST_RUN"


def of_the_clock(metric: str) -> bool:
    """Whether a metric says how long something took, which no seed decides."""
    return metric.startswith(("timing/", "perf/")) or metric.endswith("seconds")


@dataclass
class Workspace:
    """A folder with model, data and reward function. without: flags of `flags` that a run is not to have."""

    path: Path
    model: str
    without: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """The flags every run shares: 1 engine, 1 rank, 4 prompts x 4 samples per step."""
        flags: dict[str, object] = {
            "actor.model_name_or_path": self.model,
            "reward.remote_url": self.path / "reward.py",
            "data.prompt_dataset": self.path / "prompts.jsonl",
            "data.input_key": "prompt",
            "data.label_key": "label",
            "data.max_len": 64,
            "vllm.num_engines": 1,
            "algo.advantage.estimator": "reinforce_baseline",
            "algo.kl.init_coef": 0,
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "rollout.max_new_tokens": 8,
            "rollout.micro_batch_size": 16,
            "train.batch_size": 16,
            "train.micro_batch_size": 16,
            "ckpt.output_dir": self.path / "model_out",
            "ckpt.path": self.path / "checkpoints",
        }
        own = {name: value for name, value in flags.items() if name not in self.without}
        return [part for name, value in own.items() for part in (f"--{name}", str(value))]


def make_workspace(path: Path, model: str, *, prompts: int = 8, reward: str = REWARD) -> Workspace:
    path.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rows = [{"prompt": f"sort {rng.randrange(10**5):05d}", "label": i} for i in range(prompts)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "reward.py").write_text(reward)
    return Workspace(path, model)


@dataclass
class Run:
    """A started command line and everything it prints."""

    process: subprocess.Popen[bytes]
    log: Path
    mark: str
    temporary: Path
    before: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float) -> None:
        """Until `text` was printed. Raises AssertionError with the log when it does not come."""
        deadline = time.monotonic() + timeout
        while text not in self.text:
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {text!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.text}"
            time.sleep(0.05)

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"did not end within {timeout} s:\n{self.text}") from None

    def left_over(self) -> list[str]:
        """Processes, temporary folders and shared memory of this run that still exist, given two seconds to go."""
        deadline = time.monotonic() + 2
        while (left := self._left_now()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not left and self.temporary.exists():
            self.temporary.rmdir()
        return left

    def _left_now(self) -> list[str]:
        processes = [f"process {pid}: {command_of(pid)}" for pid in marked_processes(self.mark)]
        folders = [path for path in re.findall(r"Started a local Ray in (\S+)", self.text) if Path(path).exists()]
        temporary = [str(path) for path in self.temporary.glob("*")]  # L13
        return processes + folders + temporary + sorted(shared_memory() - self.before)


@contextmanager
def running(workspace: Workspace, *extra: str) -> Iterator[Run]:
    """`start_run`, ended at the latest with the block."""
    run = start_run(workspace, *extra)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait(60)


def shared_memory() -> set[str]:
    """All shared-memory segments; not semaphores, which spawned processes of other tests have too."""
    return {str(p) for p in Path("/dev/shm").iterdir() if not p.name.startswith("sem.mp-")}


def marked_processes(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return "gone"


def start_run(workspace: Workspace, *extra: str, env: dict[str, str] | None = None) -> Run:
    """Start `train_ppo_ray` in a process group of its own."""
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *workspace.flags, *extra]
    return start_command(command, workspace.path, env=env)


def start_command(command: Sequence[str], folder: Path, *, env: dict[str, str] | None = None) -> Run:
    """Start the command of a run in `folder`, where its log goes too."""
    mark = f"{folder.name}-{time.time_ns()}"
    log = folder / f"{mark}.log"
    own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS") and k != RUN_ID_VARIABLE}
    before, temporary = shared_memory(), Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short: Ray's sockets
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=own | {MARK: mark, "TMPDIR": str(temporary)} | (env or {}),
            start_new_session=True,
        )
    return Run(process, log, mark, temporary, before)


PROCESSES = {
    "engine": r"ray::EngineActor\.start",  # its core is a fork, which keeps the name of then
    "engine actor": r"ray::EngineActor(?!\.start)",
    "learner rank": "ray::PolicyActor",
    "agent worker": "ray::AgentActor",
    "reward worker": "openrlhf.agents.reward_child",
    "raylet": "raylet/raylet ",
}
"""Kinds of processes of a run, and what their command lines hold."""


def pids(run: Run, kind: str) -> list[int]:
    """The processes of a kind; none while they are not there yet."""
    commands = {pid: command_of(pid) for pid in marked_processes(run.mark)}
    return sorted(pid for pid, command in commands.items() if re.search(PROCESSES[kind], command))
