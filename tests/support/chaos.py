"""Random faults in real runs of the quickstart's job, drawn from a seed; what a run is held to afterwards.

A `Job` is trained in one or several lives: a life is a process of `train_ppo_ray`, which faults are done to at drawn
moments; one that ends is followed by another that resumes. `Ledger` counts what was trained on.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import run as quickstart
from task import make_datasets, read_jsonl

from openrlhf.launcher.record.reader import Record
from support.chaos_faults import CAUSES, KINDS, Fault, Injected, fill, harm, mount
from support.chaos_rewards import CALLS, RewardServer, reward_file
from support.stack_runs import Run, marked_processes, pids, start_command

STEPS = 16
GROUPS, SAMPLES = quickstart.ROLLOUT_BATCH, 8
ENDS_WITHIN_S = 60.0
"""From the last fault to the end of a run that does not go on."""
GONE_WITHIN_S = 30.0
"""From a run's end to that of all its processes: Ray ends a driver whose raylet is gone, and leaves the rest to its
guard."""
STUCK_S = 240.0
"""A life that neither ends nor takes a step for so long stands still: more than any bound that a run goes on after."""
FLAGS = """--ckpt.save_steps 2 --ckpt.max_num 2 --ckpt.load_enable --eval.steps 4 --rollout.max_failed_fraction 0
  --reward.timeout 4 --agent.timeout 5 --agent.num_workers 2 --vllm.num_engines 2"""
ASYNC = "--train.async_enable --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop"


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What was trained on: step -> the samples of the step, each with its tokens; how often each was."""

    samples: dict[int, Counter[tuple[str, int, bytes]]]

    @staticmethod
    def of(folder: Path) -> Ledger:
        record = Record.open(folder)
        return Ledger(
            samples={
                step: Counter((s.group_id, s.sample_index, s.tokens.tobytes()) for s in record.samples(step))
                for step in record.complete_steps()
            }
        )

    def check(self, *, steps: int = STEPS, missing: bool = False) -> None:
        """Every sample of every prompt once. missing: the record may lack steps, its disk was full."""
        assert missing or sorted(self.samples) == list(range(1, steps + 1)), sorted(self.samples)
        trained = Counter((group, index) for step in self.samples.values() for group, index, _ in step.elements())
        assert set(trained.values()) == {1}, [key for key, count in trained.items() if count > 1]
        for step, samples in self.samples.items():
            groups = Counter(group for group, _, _ in samples)
            assert len(groups) == GROUPS, (step, len(groups))
            assert set(groups.values()) == {SAMPLES}, (step, groups)


class Job:
    """The quickstart's job in a folder of its own: 16 prompts of 8 samples a step, 2 engines, 2 ranks.

    disk: where checkpoints and record lie, a small file system of its own where this process may mount one.
    """

    def __init__(self, folder: Path, warm_start: Path, *, server: bool, pipeline: str = "sync", steps: int = STEPS):
        folder.mkdir(parents=True)
        self.folder, self.steps, self.pipeline = folder, steps, pipeline
        self.paths = quickstart.Paths(output=folder, seed=1)
        self.paths.warm_start.symlink_to(warm_start)
        quickstart.clear(self.paths.run)
        counts = {"train_count": steps * GROUPS, "eval_count": quickstart.EVAL_COUNT}
        train, held_out = make_datasets(self.paths.data, **counts, seed=self.paths.seed)
        self.calls = folder / CALLS
        self.calls.touch()
        (folder / "reward.py").write_text(reward_file())
        self.server = RewardServer(self.calls) if server else None
        self.held_out = {example.question for example in read_jsonl(held_out)}
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.mounted = mount(self.disk)
        own = f"""--ckpt.path {self.disk / "checkpoints"} --logger.record_dir {self.disk / "record"}
          --reward.remote_url {folder / "reward.py" if self.server is None else self.server.url}"""
        extra = [*FLAGS.split(), *(ASYNC.split() if pipeline == "async" else []), *own.split()]
        self.command = quickstart.train_command(self.paths, train, held_out, extra)
        self.lives: list[Run] = []
        self.was_full = False

    def kinds(self) -> list[tuple[str, str]]:
        """The faults that can be done to it."""
        absent = {"reward worker"} if self.server is not None else {"reward server"}
        if not self.mounted:
            absent.add("disk")
        return [kind for kind in KINDS if kind[1] not in absent]

    def start(self) -> Run:
        self.calls.write_bytes(b"")
        self.lives.append(start_command(self.command, self.folder))
        return self.lives[-1]

    def reward_calls(self) -> tuple[int, int]:
        """Of this life, for training and for evaluations."""
        questions = self.calls.read_text().splitlines()
        held = sum(question in self.held_out for question in questions)
        return len(questions) - held, held

    def saves(self) -> bool:
        return any(self.disk.glob("checkpoints/.openrlhf-new-*"))

    def weights(self) -> str:
        """What the exported model is, bit for bit."""
        return hashlib.sha256((self.paths.model / "model.safetensors").read_bytes()).hexdigest()

    def phases(self) -> dict[str, float]:
        """Seconds from the last reward of a step to the end of what follows, by the record."""
        metrics = [step.metrics for step in Record.open(self.disk / "record").steps().values()]
        names = {"experience": "make_experience", "update": "ppo_train", "push": "broadcast"}
        means = {phase: sum(m[f"timing/{name}"] for m in metrics) / len(metrics) for phase, name in names.items()}
        return dict(zip(means, itertools.accumulate(means.values()), strict=True))

    def ledger(self) -> Ledger:
        return Ledger.of(self.disk / "record")

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self.mounted:
            subprocess.run(["umount", "--lazy", self.disk], check=True)


@contextmanager
def made(folder: Path, warm_start: Path, *, server: bool, pipeline: str = "sync", steps: int = STEPS) -> Iterator[Job]:
    """A job; its processes are gone afterwards."""
    job = Job(folder, warm_start, server=server, pipeline=pipeline, steps=steps)
    try:
        yield job
    finally:
        for run in job.lives:
            for pid in [run.process.pid, *marked_processes(run.mark)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.process.wait(60)
        job.close()


def steps_done(run: Run) -> int:
    """The last step that the run logged."""
    found = re.findall(r"^step (\d+) ", run.text, re.MULTILINE)
    return int(found[-1]) if found else 0


@dataclass
class Life:
    """One process of a job, watched from outside."""

    job: Job
    run: Run
    shares: dict[str, float]
    """Seconds from the last reward of a step to the end of each phase that follows, in an unharmed run."""
    first: int = 0
    """Steps that were done before it."""
    injected: list[Injected] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    _sampled: float | None = None

    def alive(self) -> bool:
        return self.run.process.poll() is None

    def phase(self) -> str:
        """What the run is doing, as far as files and calls tell."""
        text = self.run.text
        if "start: driver" not in text:
            return "start"
        if self.job.saves():
            return "save"
        steps = steps_done(self.run)
        done = max(0, steps - self.first) if steps else 0
        calls, held = self.job.reward_calls()
        if steps >= self.job.steps:
            return "end"
        if calls >= (done + 1) * GROUPS:
            if self._sampled is None:
                self._sampled = time.monotonic()
            past = time.monotonic() - self._sampled
            return next((name for name, until in self.shares.items() if past <= until), "push")
        self._sampled = None
        evaluations = steps // 4 - self.first // 4
        if evaluations > 0 and held < evaluations * quickstart.EVAL_COUNT:
            return "evaluation"
        return "generation"

    def wait(self, until: Callable[[], bool], *, seconds: float = STUCK_S) -> bool:
        """Whether it came to that before the run ended; AssertionError when neither happens."""
        deadline, seen = time.monotonic() + seconds, -1
        while not until():
            if not self.alive():
                return False
            if (steps := steps_done(self.run)) != seen:
                deadline, seen = time.monotonic() + seconds, steps
            assert time.monotonic() < deadline, f"stands still for {seconds:.0f} s:\n{self.story()}"
            time.sleep(0.02)
        return True

    def beyond(self, step: int) -> bool:
        """Whether a step was logged after number `step`, or all were."""
        return steps_done(self.run) > min(step, self.job.steps - 1)

    def story(self) -> str:
        done = "\n".join(f"  after {i.at - self.started:.1f} s {i}" for i in self.injected)
        return f"faults of this life:\n{done}\n{self.run.text[-8000:]}"

    def until_moment(self, fault: Fault) -> bool:
        """Whether the fault's moment came while the run lived."""
        if self.phase() == "start" and fault.phase == "start":
            return self.wait(lambda: time.monotonic() > self.started + 12 * fault.wait)
        due = steps_done(self.run) + fault.gap if self.injected else self.first + fault.gap
        if not self.wait(lambda: steps_done(self.run) >= min(due, self.job.steps) or self.phase() == "end"):
            return False
        wanted = self.phase() if fault.phase == "start" else fault.phase
        last = self.job.steps if fault.phase == "end" else min(steps_done(self.run) + 4, self.job.steps)
        if not self.wait(lambda: self.phase() in (wanted, "end") or steps_done(self.run) >= last):
            return False
        time.sleep(fault.wait * (0.3 if wanted in ("generation", "evaluation", "end") else 0.04))
        return self.alive()

    def inject(self, fault: Fault) -> bool:
        """Do it; False where what it is done to is not there."""
        phase = self.phase()
        if fault.what == "disk":
            self.injected.append(Injected(fault, time.monotonic(), phase))
            self.job.was_full = True
            fill(self.job.disk / "filler")
            return True
        if fault.what == "reward server":
            assert self.job.server is not None
            self.injected.append(Injected(fault, time.monotonic(), phase))
            self.job.server.spoil(fault.how, fault.count)
            return True
        found = pids(self.run, fault.what)
        if not found:
            return False
        pid = found[int(fault.which * len(found))]
        self.injected.append(Injected(fault, time.monotonic(), phase))
        harm(pid, fault)
        return True

    def recovered(self) -> None:
        """Free what a fault takes for a while."""
        (self.job.disk / "filler").unlink(missing_ok=True)
        if self.job.server is not None:
            self.job.server.spoil("", 0)


def afflict(life: Life, faults: list[Fault]) -> None:
    """Do faults from the front of the list, which they leave, as long as the life lasts."""
    while faults and life.until_moment(faults[0]):
        fault = faults.pop(0)
        if not life.inject(fault):
            continue  # a worker that is just being started again: this fault has nothing to be done to
        lasts = 2 if fault.what == "disk" else 0  # until a save
        life.wait(partial(life.beyond, steps_done(life.run) + lasts))
        if life.injected[-1].phase == "end":
            return  # one of them: the run is over in a moment
        if life.alive():
            life.injected[-1].came = f"went on after {time.monotonic() - life.injected[-1].at:.1f} s"
            life.recovered()


def live(job: Job, shares: dict[str, float], faults: list[Fault], *, first: int = 0) -> Life:
    """One life of the job until it ends, with these faults as far as it comes."""
    life = Life(job, job.start(), shares, first)
    afflict(life, faults)
    life.wait(lambda: False)
    if life.injected and not life.injected[-1].came:
        life.injected[-1].came = "went on to its end"
    life.recovered()
    return life


def check_end(life: Life) -> None:
    """A life ended in order, or soon after a fault and with its cause; nothing is left of it."""
    ended, run = time.monotonic(), life.run
    while (left := run.left_over()) and time.monotonic() < ended + GONE_WITHIN_S:
        time.sleep(0.5)
    assert not left, f"left over after {run.process.returncode}: {left}\n{life.story()}"
    if run.process.returncode == 0:
        return
    assert life.injected, f"ended with {run.process.returncode} without a fault\n{life.story()}"
    last = life.injected[-1]
    took = ended - last.at
    tail = run.text[-3000:]
    last.came = f"ended after {took:.1f} s with {run.process.returncode}: {tail.strip().splitlines()[-1][:200]}"
    assert took <= ENDS_WITHIN_S, f"ended {took:.1f} s after the last fault\n{life.story()}"
    causes = [CAUSES[i.fault.what] for i in life.injected]
    assert any(re.search(cause, tail) for cause in causes), f"the cause is not named\n{life.story()}"
