"""Random faults of every kind at random moments of real runs: each goes on, or ends soon, by name, and resumes.

`OPENRLHF_CHAOS_SEED` draws other faults, `OPENRLHF_CHAOS_FAULTS` says how many in all. A failing run prints its seed
and what was done to it when.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from evaluate import accuracy
from task import read_jsonl
from warm_start import WarmStart, make_warm_start

from support.chaos import Job, Ledger, check_end, live, made, steps_done
from support.chaos_faults import Fault, Injected, draw

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(6000)]

SEED = int(os.environ.get("OPENRLHF_CHAOS_SEED", "1"))
FAULTS = int(os.environ.get("OPENRLHF_CHAOS_FAULTS", "100"))
PIPELINES = {"sync, rewards by file": 0.4, "sync, reward server": 0.4, "async, rewards by file": 0.2}
"""Their shares of the faults."""
CLOSE = 0.02


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "warm_start"
    make_warm_start(folder, WarmStart())
    return folder


def greedy_accuracy(job: Job) -> float:
    """On the held-out questions; at temperature 0, where no draw blurs it."""
    return accuracy(job.paths.model, read_jsonl(job.paths.data / "eval.jsonl"), temperature=0)


def told(injected: list[Injected]) -> str:
    lines = [str(i) for i in injected]
    for what, key in (("kinds", lambda i: f"{i.fault.how} {i.fault.what}"), ("phases", lambda i: i.phase)):
        lines.append(f"{what}: {dict(Counter(map(key, injected)))}")
    went_on = sum(i.came.startswith("went on") for i in injected)
    return "\n".join([*lines, f"{len(injected)} faults: {went_on} runs went on, {len(injected) - went_on} did not"])


@dataclass(frozen=True, kw_only=True)
class Unharmed:
    """A run without faults."""

    ledger: Ledger
    weights: str
    accuracy: float
    phases: dict[str, float]


def unharmed(folder: Path, base: Path, **options: Any) -> Unharmed:
    with made(folder, base, **options) as job:
        life = live(job, {}, [])
        check_end(life)
        assert life.run.process.returncode == 0, life.story()
        job.ledger().check()
        return Unharmed(ledger=job.ledger(), weights=job.weights(), accuracy=greedy_accuracy(job), phases=job.phases())


def harm_to_the_end(job: Job, faults: list[Fault], phases: dict[str, float], done: list[Injected]) -> None:
    """Lives of the job, each of which resumes the one before, until one reaches the end."""
    first = 0
    while True:
        life = live(job, phases, faults, first=first)
        done += life.injected
        check_end(life)
        first = max(first, steps_done(life.run))
        if life.run.process.returncode == 0:
            return


@pytest.mark.parametrize("name", list(PIPELINES))
def test_runs_survive_random_faults(name: str, base: Path, tmp_path: Path) -> None:
    """Runs of the synchronous pipeline end with the weights of the unharmed one, bit for bit; others as accurate."""
    options = {"pipeline": name.split(",")[0], "server": "server" in name}
    exact = options["pipeline"] == "sync"
    wanted = [unharmed(tmp_path / f"unharmed{i}", base, **options) for i in range(1 if exact else 3)]
    count = round(FAULTS * PIPELINES[name])
    done: list[Injected] = []
    faults: list[Fault] = []
    reached: list[float] = []
    while len(done) < count:
        number, before = len(reached) + 1, len(done)
        with made(tmp_path / f"job{number}", base, **options) as job:
            faults = faults or draw(SEED * 1000 + number, count, kinds=job.kinds())
            try:
                harm_to_the_end(job, faults, wanted[0].phases, done)
                job.ledger().check(missing=job.was_full)
                for step, samples in job.ledger().samples.items() if exact else ():
                    assert samples == wanted[0].ledger.samples[step], f"other samples in step {step}"
                assert not exact or job.weights() == wanted[0].weights, "other weights than the unharmed run's"
                reached.append(greedy_accuracy(job))
            finally:
                about = f"job {number} of OPENRLHF_CHAOS_SEED={SEED}, {len(job.lives)} lives"
                print(f"{name}: {about}\n{told(done[before:])}", flush=True)
    print(f"{name}: all; accuracies {reached}, unharmed {[run.accuracy for run in wanted]}\n{told(done)}")
    assert mean(reached) == pytest.approx(mean(run.accuracy for run in wanted), abs=CLOSE)
