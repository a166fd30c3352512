"""What a record costs: seconds of a step and bytes per token, on a run of the quickstart that was recorded.

Every step of the run is recorded again as its ranks did it, from tensors to files, one rank at a time; so is the
controller's part. The sum of the slowest rank and the controller is compared with the step of the run.

    make quickstart && .venv/bin/python benchmarks/record.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from openrlhf.agents.types import PromptItem
from openrlhf.core.config import PolicyLossConfig
from openrlhf.launcher.ranks.batches import Origin, RankBatch, build_batch
from openrlhf.launcher.ranks.recording import Recorder
from openrlhf.launcher.record.files import SAMPLES, step_files
from openrlhf.launcher.record.place import RecordPlace
from openrlhf.launcher.record.reader import Record
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.record.sample_writer import SampleWriter
from openrlhf.launcher.record.schema import RecordedSample
from openrlhf.launcher.samples import Group, SampleRef, sample_info
from openrlhf.learner.objective import PolicyObjective

SHARE, BYTES = 0.02, 12.0
"""Aims: share of a step, bytes per token."""
GIB = 2**30


def prepared(samples: list[RecordedSample]) -> RankBatch:
    """A rank's batch as it was when it was recorded."""
    trajectories = [sample.trajectory() for sample in samples]
    refs = [
        SampleRef(handle=None, position=s.place, index=s.index, reward=s.shaped, length=len(s.tokens), raw=s.reward)
        for s in samples
    ]
    batch = build_batch(trajectories, indices=[r.index for r in refs], rewards=[r.reward for r in refs], max_len=10**6)
    batch = batch.with_(advantages=batch.rollout_logprobs, old_logprobs=batch.rollout_logprobs)
    origins = [Origin.of(t, r, 10**6) for t, r in zip(trajectories, refs, strict=True)]
    return RankBatch(batch=batch, rows=[range(len(samples))], origins=origins, step=samples[0].step)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def rank_seconds(recorder: Recorder, batch: RankBatch) -> float:
    """Beside the update, which does nothing here."""
    objective = PolicyObjective(config=PolicyLossConfig())

    def update() -> None:
        with recorder.watching(batch, objective):
            pass

    return seconds(update)


def controller_seconds(record: Record, out: RunRecord, step: int, samples: list[RecordedSample]) -> float:
    recorded = record.steps()[step]
    by_group: dict[str, list[RecordedSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample)
    groups, refs = [], []
    for name, own in by_group.items():
        infos = [sample_info(sample.trajectory(), max_len=10**6) for sample in own]
        groups.append(Group(prompt=PromptItem(group_id=name, prompt=own[0].prompt), samples=infos, handle=name))
        refs += [
            SampleRef(handle=name, position=i, index=s.index, reward=s.shaped, length=0) for i, s in enumerate(own)
        ]
    # the handle of a group is one object, by whose identity its samples are found
    refs = [replace(ref, handle=next(g.handle for g in groups if g.handle == ref.handle)) for ref in refs]

    def write() -> None:
        out.batch(step, groups, refs, before=recorded.before, sampling=recorded.sampling)
        out.metrics(step, recorded.metrics)

    return seconds(write)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="out/quickstart", help="folder of a recorded run, or one above")
    record = Record.open(parser.parse_args().run)
    steps = record.complete_steps()[1:]  # the first one loads libraries
    shares, tokens = [], 0
    with tempfile.TemporaryDirectory() as folder:
        place = RecordPlace(folder=Path(folder), max_bytes=GIB)
        recorders = [Recorder(SampleWriter(place, rank)) for rank in range(record.about["ranks"])]
        out = RunRecord(place.folder, run="", name="", ranks=1, goes_on=False, config_toml="")
        for step in steps:
            samples = record.samples(step)
            tokens += sum(len(sample.tokens) for sample in samples)
            own = [rank_seconds(r, prepared(samples[i :: len(recorders)])) for i, r in enumerate(recorders)]
            took = max(own) + controller_seconds(record, out, step, samples)
            shares.append(took / record.steps()[step].metrics["timing/step_total"])
    files = [file.path for file in step_files(record.folder / SAMPLES) if file.step in steps]
    size = sum(path.stat().st_size for path in files)
    share, per_token = median(shares), size / tokens
    print(f"{record.folder}: {len(steps)} steps of {tokens / len(steps):.0f} tokens")
    print(f"recording takes {share:.2%} of a step (median; aim: {SHARE:.0%})")
    print(f"samples take {per_token:.2f} bytes per token (aim: {BYTES:g})")
    return 0 if share <= SHARE and per_token <= BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
