"""The three trainers as command lines: they train, evaluate, save, go on bit for bit and export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf.launcher.supervised.process import complete_environment
from support import supervised_runs
from support.supervised_runs import RESUMED, WARNED

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, done in one process."""
    folder = tmp_path_factory.mktemp("supervised")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    command = [sys.executable, supervised_runs.__file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def codes(runs: Path) -> dict[str, int]:
    return json.loads((runs / "results.json").read_text())


def metrics(runs: Path, name: str) -> list[dict[str, Any]]:
    """The logged lines, without what depends on the clock."""
    lines = map(json.loads, (runs / "logs" / name / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("timing/")} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("kind", RESUMED)
def test_b115_a_run_goes_on_bit_for_bit(runs: Path, kind: str) -> None:
    assert codes(runs)[f"{kind}-straight"] == codes(runs)[f"{kind}-resumed"] == 0
    straight, resumed = metrics(runs, f"{kind}-straight"), metrics(runs, f"{kind}-resumed")
    assert [line["step"] for line in straight] == [1, 2, 3, 3, 4, 5, 6, 6]  # three steps an epoch, then an evaluation
    assert resumed == straight[-3:]
    want, got = weights(runs / f"{kind}-straight"), weights(runs / f"{kind}-resumed")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_warned_run_saves_ends_with_85_and_goes_on_bit_for_bit(runs: Path) -> None:
    assert (codes(runs)[WARNED], codes(runs)[f"{WARNED}-resumed"]) == (85, 0)
    assert "SIGUSR1 received" in (runs / f"{WARNED}.txt").read_text()
    assert "stopped after step 2; a checkpoint was written" in (runs / f"{WARNED}.txt").read_text()
    both = [*metrics(runs, WARNED), *metrics(runs, f"{WARNED}-resumed")]
    assert both == metrics(runs, "sft-straight")
    want, got = weights(runs / "sft-straight"), weights(runs / f"{WARNED}-resumed")
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", RESUMED)
def test_what_is_logged_and_saved(runs: Path, kind: str) -> None:
    last = metrics(runs, f"{kind}-straight")[-2]
    names = {"sft": {"gpt_loss"}, "rm": {"reward_std", "margin", "acc"}, "dpo": {"nll_loss", "margin", "chosen_reward"}}
    assert {f"train/{n}" for n in (*names[kind], "grad_norm", "lr", "epoch")} <= last.keys()
    assert last["train/epoch"] == 2.0
    assert 0 < last["train/lr"] < 1e-3 or kind == "rm"
    checkpoint = runs / f"checkpoints-{kind}" / "global_step4"
    assert (checkpoint / "model").is_dir()
    assert "[train]" in (checkpoint / "state" / "config.toml").read_text()
    printed = (runs / f"{kind}-straight.txt").read_text()
    assert f"done: 6 optimiser steps\n  model: {runs / f'{kind}-straight'}" in printed
    assert printed.count("\nstep 6 of 6  ") == 1


def test_a_reward_model_carries_head_and_statistics_of_its_rewards(runs: Path) -> None:
    config = json.loads((runs / "rm-straight" / "config.json").read_text())
    evaluation = metrics(runs, "rm-straight")[-1]
    assert config["value_head_prefix"] == "score"
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert (config["mean"], config["std"]) == pytest.approx((evaluation["eval/reward"], evaluation["eval/reward_std"]))
    assert weights(runs / "rm-straight")["score.weight"].shape == (1, 64)


def test_adapters_are_exported_alone_and_merged(runs: Path) -> None:
    names = weights(runs / "dpo-straight")
    assert all(".lora_" in name for name in names)
    assert codes(runs)["merge"] == 0
    assert "merged model: " in (runs / "merge.txt").read_text()
    merged, base = weights(runs / "merged"), weights(runs / "model")
    assert merged.keys() == base.keys()
    assert any(not torch.equal(merged[name], base[name]) for name in base)


def test_completions_are_distilled(runs: Path) -> None:
    """A larger teacher; each step is nearer to it, on the data's tokens alone or beside their likelihood."""
    for name in ("distilled", "distilled-top"):
        assert codes(runs)[name] == 0, (runs / f"{name}.txt").read_text()
        steps = [line["train/distill_loss"] for line in metrics(runs, name) if "train/distill_loss" in line]
        assert len(steps) == 6
        assert 0 < steps[-1] < steps[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad-key", "error: --data.output_key 'answer': "),
        ("bad-model", "nowhere': not found; give a folder with a Hugging Face model or a hub name"),
        ("bad-resume", "was written with batch_size 4 (--train.batch_size), this run has 5"),
    ],
)
def test_a_mistake_is_one_message(runs: Path, name: str, message: str) -> None:
    assert codes(runs)[name] == 1
    text = (runs / f"{name}.txt").read_text()
    assert message in text
    assert "Traceback" not in text


def test_the_environment_of_launchers_wins() -> None:
    plain: dict[str, str] = {}
    complete_environment(plain, local_rank=-1)
    assert (plain["RANK"], plain["WORLD_SIZE"], plain["LOCAL_RANK"], plain["MASTER_ADDR"]) == (
        "0",
        "1",
        "0",
        "127.0.0.1",
    )
    assert int(plain["MASTER_PORT"]) > 0
    launched = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    complete_environment(launched, local_rank=1)
    assert launched == {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
