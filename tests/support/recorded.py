"""Records for tests, written by what a run writes them with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.agents.types import PromptItem, StopReason, Turn
from openrlhf.launcher.commands import TRAIN_PPO_RAY
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.record.files import SAMPLES, step_files
from openrlhf.launcher.record.place import RecordPlace
from openrlhf.launcher.record.run_record import RunRecord
from openrlhf.launcher.record.sample_writer import SampleWriter
from openrlhf.launcher.record.schema import RecordedSample
from openrlhf.launcher.samples import Group, SampleInfo, SampleRef
from openrlhf.launcher.saved import config_toml
from support.launcher_tokenizer import byte_tokenizer
from support.trainer_fakes import FAILED

GIB = 2**30


@cache
def _tokenizer() -> Any:
    return byte_tokenizer()


def sample(step: int, index: int, *, group: int = 0, place: int = 0, **changes: Any) -> RecordedSample:
    """Prompt "sort 312", answer of four random letters; the second sample of a group is right."""
    seeded = np.random.default_rng([step, index])
    prompt = _tokenizer().encode("sort 312 ")
    answer = _tokenizer().encode("".join(map(chr, seeded.integers(97, 123, 4))))
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    own = {
        "step": step,
        "index": index,
        "mini_batch": 0,
        "group_id": f"e0-p{group}",
        "sample_index": place,
        "place": place,
        "prompt": "sort 312 ",
        "label": {"answer": "123"},
        "tokens": tokens,
        "trainable": mask,
        "engine_logprobs": np.where(mask, -seeded.random(len(tokens)), 0).astype(np.float32),
        "trainer_logprobs": np.where(mask, -seeded.random(len(tokens)), 0).astype(np.float32),
        "versions": np.where(mask, step - 1, -1).astype(np.int32),
        "advantages": np.where(mask, place - 0.5, 0).astype(np.float32),
        "prompt_length": len(prompt),
        "turns": [Turn(start=len(prompt), end=len(tokens), finish_reason="stop")],
        "stop_reason": StopReason.STOP,
        "reward": float(place),
        "score": float(place),
        "shaped": place - 0.5,
        "extra_logs": {"format": 0.1},
    }
    return RecordedSample(**(own | changes))


def group_of(number: int, samples: Sequence[SampleInfo]) -> Group:
    """A group whose handle is its name."""
    prompt = PromptItem(group_id=f"e0-p{number}", prompt="sort 312 ", position=number)
    return Group(prompt=prompt, samples=samples, handle=f"h{number}")


def write_record(folder: Path, *, steps: int = 3, ranks: int = 1, groups: int = 2) -> Path:
    """A record of groups of three: a wrong sample, a right one, and one that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    toml = config_toml(TRAIN_PPO_RAY, TrainPPOConfig())
    record = RunRecord(folder, run="ab12", name=folder.name, ranks=ranks, goes_on=False, config_toml=toml)
    record.tokenizer(_tokenizer().backend_tokenizer.save)
    info = SampleInfo(
        reward=0.0, score=0.0, total_length=13, num_trainable=4, longest_turn=4, truncated=False, failed=False
    )
    failed = replace(FAILED, failure="reward: boom\nTraceback ...")
    writers = [SampleWriter(RecordPlace(folder=folder, max_bytes=GIB), rank) for rank in range(ranks)]
    for step in range(1, steps + 1):
        batch = [group_of(number, [info, info, failed]) for number in range(groups)]
        refs = [
            SampleRef(handle=f"h{g}", position=p, index=2 * g + p, reward=p - 0.5, length=13)
            for g in range(groups)
            for p in range(2)
        ]
        state = {"state": {"step": step - 1}, "kl": {}, "reward_norm": None}
        record.batch(step, batch, refs, before=state, sampling={"rollout/failed_samples": float(groups)})
        made = [sample(step, ref.index, group=ref.index // 2, place=ref.position) for ref in refs]
        for rank, writer in enumerate(writers):
            writer.write(step, made[rank::ranks], {})
        record.metrics(step, {"train/reward": 0.5, "timing/step_total": 1.0})
    record.evaluation(steps, {"eval/eval_default_pass1": 0.5})
    record.alarm(
        {
            "step": steps,
            "time": 0.0,
            "name": "no_reward_variance",
            "state": "raised",
            "evidence": "train/group_reward_std is 0 for 3 steps",
            "fix": "--algo.dynamic_filtering_enable",
        }
    )
    return folder


def many_samples(step: int) -> list[RecordedSample]:
    """64 samples of 32 prompts."""
    return [sample(step, i, group=i // 2, place=i % 2) for i in range(64)]


def kill_writers(folders: Sequence[str]) -> None:
    """Let a process write step after step into each folder, and kill it: every time a little later."""
    _tokenizer()
    for number, folder in enumerate(map(Path, folders)):
        if not (pid := os.fork()):
            _write_without_end(folder)
        while len(step_files(folder / SAMPLES)) < 3:
            time.sleep(0.001)
        time.sleep(number * 0.0007)  # another place in the loop each time
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _write_without_end(folder: Path) -> None:
    write_record(folder, steps=1)
    writer, step = SampleWriter(RecordPlace(folder=folder, max_bytes=10**6), 0), 1
    while True:
        step += 1
        writer.write(step, many_samples(step), {})
