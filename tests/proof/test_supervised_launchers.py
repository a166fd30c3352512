"""Supervised training on two ranks, as torchrun and deepspeed start it; one warned rank is enough for all to save.

Rows that are cut over both give the model that one rank trains.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from support.supervised_runs import write_data
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.proof, pytest.mark.ranks, pytest.mark.timeout(1800)]

BIN = Path(sys.executable).parent
TORCHRUN = (f"{BIN}/torchrun", "--nproc-per-node", "2", "-m")
DEEPSPEED = (f"{BIN}/deepspeed", "--num_gpus", "2", "--module")
ALONE = (f"{BIN}/python", "-m")


class Runs:
    """Runs of the supervised trainers in one folder, 4 steps an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_qwen3(folder / "model")
        write_data(folder, rows=16)
        self.environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}

    def command(self, launcher: tuple[str, ...], name: str, *more: str, kind: str = "sft") -> list[str]:
        flags = {
            "model.model_name_or_path": self.model,
            **self.data(kind),
            "data.max_len": 64,
            "train.batch_size": 4,
            "train.micro_batch_size": 2,
            "train.max_epochs": 3,
            "ds.zero_stage": 3,
            "ckpt.path": self.folder / f"checkpoints-{name}",
            "ckpt.output_dir": self.folder / name,
            "data.cache_dir": self.folder / "tokens",
        }
        return [
            *launcher,
            f"openrlhf.cli.train_{kind}",
            *(w for k, v in flags.items() for w in (f"--{k}", str(v))),
            *more,
        ]

    def data(self, kind: str) -> dict[str, Any]:
        if kind == "sft":
            return {
                "data.dataset": self.folder / "sft.jsonl",
                "data.input_key": "input",
                "data.output_key": "output",
            }
        return {"data.dataset": self.folder / "pairs.jsonl", "data.prompt_key": "prompt"}

    def finish(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def weights(self, name: str) -> bytes:
        return (self.folder / name / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("launchers"))


def test_one_warned_rank_saves_for_all_and_the_run_goes_on_bit_for_bit(runs: Runs) -> None:
    log = runs.folder / "warned.txt"
    command = runs.command(TORCHRUN, "warned")
    with log.open("w") as out, subprocess.Popen(command, env=runs.environment, stdout=out, stderr=out) as torchrun:
        deadline = time.monotonic() + 300
        while "step 3 " not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            assert torchrun.poll() is None, log.read_text()
            time.sleep(0.05)
        ranks = [p for p in psutil.Process(torchrun.pid).children() if p.environ().get("RANK") == "1"]
        ranks[0].send_signal(signal.SIGUSR1)
        assert torchrun.wait(120) == 1  # torchrun's own, whatever its ranks end with
    assert "a checkpoint was written; resume with --ckpt.load_enable" in log.read_text()
    assert "(exitcode: 85)" in log.read_text()
    assert "done: 12 optimiser steps" in runs.finish(runs.command(TORCHRUN, "warned", "--ckpt.load_enable"))
    runs.finish(runs.command(TORCHRUN, "straight"))
    assert runs.weights("warned") == runs.weights("straight")


def test_deepspeed_starts_the_same_run(runs: Runs) -> None:
    assert "done: 12 optimiser steps" in runs.finish(runs.command(DEEPSPEED, "deepspeed"))
    runs.finish(runs.command(TORCHRUN, "torchrun"))
    assert runs.weights("deepspeed") == runs.weights("torchrun")


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_rows_cut_over_two_ranks_give_the_model_of_one(runs: Runs, kind: str) -> None:
    # a large epsilon: without it the rounding of a gradient decides about the step of a weight that has none
    more = ["--ds.packing_samples", "--adam.lr", "1e-3", "--adam.eps", "1e-2", "--train.max_epochs", "1"]
    runs.finish(runs.command(ALONE, f"{kind}-alone", *more, kind=kind))
    cut = ["--ds.ring_attn_size", "2", "--ds.ring_attn_head_stride", "2"]
    runs.finish(runs.command(TORCHRUN, f"{kind}-cut", *more, *cut, kind=kind))
    want, got = (load_file(runs.folder / f"{kind}-{name}" / "model.safetensors") for name in ("alone", "cut"))
    before = load_file(Path(runs.model) / "model.safetensors")
    moved = max(float((want[n] - before[n]).abs().max()) for n in want if n in before)
    assert moved > 1e-4
    assert max(float((want[n] - got[n]).abs().max()) for n in want) < 1e-5
