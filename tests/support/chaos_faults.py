"""Kinds of faults, drawn from a seed, and how each is done to a process or a disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DISK_MIB = 24
"""Of the folder for checkpoints and record: room for what a run writes, and quickly full."""
PROCESS_FAULTS = {
    "kill": ["engine", "engine actor", "agent worker", "reward worker", "learner rank", "raylet"],
    "stop": ["engine", "engine actor", "agent worker", "reward worker", "learner rank", "raylet"],
    "pause": ["engine", "engine actor", "agent worker", "learner rank", "raylet"],
    "stutter": ["engine", "engine actor"],
}
GENTLE = [
    *(("kill", what) for what in ("engine", "engine actor", "agent worker", "reward worker")),
    *(("pause", what) for what in ("engine", "agent worker", "learner rank", "raylet")),
    ("stutter", "engine"),
]
"""Those that a run survives, and soon."""
OTHER_FAULTS = [("fill", "disk"), ("hang", "reward server"), ("nonsense", "reward server"), ("fail", "reward server")]
KINDS = [(how, what) for how, targets in PROCESS_FAULTS.items() for what in targets] + OTHER_FAULTS
PHASES = ["start", "generation", "experience", "update", "push", "evaluation", "save"]
CAUSES = {
    "engine": r"engine \d",
    "engine actor": r"engine \d",
    "agent worker": r"agent worker",
    "reward worker": r"reward",
    "learner rank": r"policy rank \d",
    "raylet": r"Ray ended: raylet|Raylet is terminated",
    "disk": r"No space left",
    "reward server": r"reward server|rewards",
}
"""What the end of a run that a fault ended says of it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """how: `kill`, `stop` (for good), `pause` (stopped for `seconds`), `stutter` (stopped again and again for so long),
    `fill` a disk, `hang`, `nonsense` or `fail` of the next `count` answers of the reward server. which: of several
    processes. phase, wait: when it is done; gap: how many steps after the fault before it.
    """

    how: str
    what: str
    phase: str
    wait: float
    gap: int
    which: float
    seconds: float
    count: int

    def __str__(self) -> str:
        return f"{self.how} {self.what} in {self.phase}+{self.wait:.2f}s"


def draw(seed: int, count: int, *, kinds: Sequence[tuple[str, str]] = KINDS) -> list[Fault]:
    """`count` faults of these kinds, each as often as the others, in random order and at random moments."""
    rng = random.Random(seed)
    names = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(names)
    return [
        Fault(
            how=how,
            what=what,
            phase=rng.choice(PHASES) if rng.random() > 0.05 else "end",
            wait=rng.random(),
            gap=rng.choice([0, 1, 1, 2]),
            which=rng.random(),
            seconds=rng.uniform(1.0, 6.0),
            count=rng.choice([1, 2, 1000]),
        )
        for how, what in names
    ]


@dataclass
class Injected:
    """A fault that was done: when, in which phase by what could be seen from outside, and what came of it."""

    fault: Fault
    at: float
    phase: str
    came: str = ""

    def __str__(self) -> str:
        return f"{self.fault} (seen: {self.phase}): {self.came}"


def mount(folder: Path) -> bool:
    """Whether `folder` is a small file system now: that takes root."""
    options = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "chaos", str(folder)]
    with suppress(OSError):
        return subprocess.run(options, capture_output=True, check=False).returncode == 0
    return False


def fill(path: Path) -> None:
    with suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def harm(pid: int, fault: Fault) -> None:
    """Send the signals of a fault of a process, which may end meanwhile."""
    with suppress(ProcessLookupError):
        if fault.how == "kill":
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        if fault.how == "stop":
            return
        until = time.monotonic() + fault.seconds
        while fault.how == "stutter" and time.monotonic() < until:
            time.sleep(0.15)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(pid, signal.SIGSTOP)
        time.sleep(max(0.0, until - time.monotonic()))
        os.kill(pid, signal.SIGCONT)
