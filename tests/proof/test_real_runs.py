"""Whole runs of the real command line on the quickstart's task: PPO with a critic, PPO with a reward model, KL."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import run as quickstart
from evaluate import accuracy
from model import render_prompt
from task import read_jsonl
from transformers import AutoTokenizer
from warm_start import WarmStart, make_warm_start

from support.tiny_reward import train_reward_model

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(1800)]

CRITIC = "--algo.advantage.estimator gae --algo.advantage.lambd 0.95 --critic.num_gpus_per_node 1 --critic.adam.lr 1e-3"
VARIANTS = {
    "ppo with a critic": CRITIC,
    "ppo with a reward model": f"{CRITIC} --reward.num_gpus_per_node 1 --reward.model_name_or_path RM",
    "kl penalty": "--algo.kl.init_coef 0.01 --algo.kl.estimator k1 --ref.num_gpus_per_node 1",
    "grpo with kl loss": "--algo.advantage.estimator group_norm --algo.kl.init_coef 0.01 --algo.kl.use_loss "
    "--algo.kl.estimator k3 --ref.num_gpus_per_node 2",
    "icepop": "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "warm_start"
    make_warm_start(folder, WarmStart())
    return folder


@pytest.fixture(scope="module")
def reward_model(base: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(base)
    folder = base.parent / "reward_model"
    held = train_reward_model(base, folder, render=lambda digits: render_prompt(tokenizer, f"sort {digits}"))
    assert held >= 0.9
    return folder


@pytest.mark.parametrize("name", list(VARIANTS))
def test_variant_learns(name: str, base: Path, reward_model: Path, tmp_path: Path) -> None:
    paths = quickstart.Paths(output=tmp_path, seed=1)
    paths.warm_start.symlink_to(base)
    train, held_out = quickstart.prepare(paths, steps=40)
    extra = [str(reward_model) if part == "RM" else part for part in VARIANTS[name].split()]
    command = quickstart.train_command(paths, train, held_out, extra)
    if "RM" in VARIANTS[name]:
        place = command.index("--reward.remote_url")
        del command[place : place + 2]
        # an in-cluster reward model scores training batches; the independent judge below does the evaluation
        for flag in ("--eval.dataset", "--eval.steps", "--eval.temperature", "--eval.n_samples_per_prompt"):
            place = command.index(flag)
            del command[place : place + 2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    after = accuracy(paths.model, read_jsonl(held_out))
    print(f"{name}: T=1 accuracy {after:.3f}")
    assert after >= 0.75
