"""Whole runs of the real command line on the quickstart's task: algorithms in sync, icepop in async and partial."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import run as quickstart
from evaluate import accuracy
from model import render_prompt
from report import read_events
from task import read_jsonl
from transformers import AutoTokenizer
from warm_start import WarmStart, make_warm_start

from support.tiny_reward import train_reward_model

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(1800)]

CRITIC = "--algo.advantage.estimator gae --algo.advantage.lambd 0.95 --critic.num_gpus_per_node 1 --critic.adam.lr 1e-3"
LORA = "--ds.lora.rank 16 --ds.lora.alpha 32 --ds.lora.save_merged --actor.adam.lr 5e-3 --algo.kl.init_coef 0.001"
VARIANTS = {
    "ppo with a critic": CRITIC,
    "ppo with a reward model": f"{CRITIC} --reward.num_gpus_per_node 1 --reward.model_name_or_path RM "
    "--reward.normalize_enable --algo.kl.init_coef 0.02 --algo.kl.estimator k1 --ref.num_gpus_per_node 2",
    "kl penalty": "--algo.kl.init_coef 0.01 --algo.kl.estimator k1 --ref.num_gpus_per_node 1",
    "grpo with kl loss": "--algo.advantage.estimator group_norm --algo.kl.init_coef 0.01 --algo.kl.use_loss "
    "--algo.kl.estimator k3 --ref.num_gpus_per_node 2",
    "top-p, reference reset": "--rollout.top_p 0.9 --algo.kl.init_coef 0.01 --algo.kl.estimator k1 "
    "--ref.num_gpus_per_node 1 --ref.sync_steps 10",
    "lora, its base the reference": LORA,
    "lora, served by the engine; ppo": f"{LORA} --vllm.lora_push adapter --algo.advantage.estimator gae "
    "--algo.advantage.lambd 0.95 --critic.num_gpus_per_node 1 --critic.adam.lr 1e-2",
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


ICEPOP = VARIANTS["icepop"]
PIPELINES = {
    "async": f"{ICEPOP} --train.async_enable",
    "partial": f"{ICEPOP} --train.async_enable --train.partial_rollout_enable",
}


def train(folder: Path, base: Path, extra: list[str], *, seed: int) -> float:
    """One run of 40 steps with these flags; the exported model's held-out accuracy at T=1."""
    paths = quickstart.Paths(output=folder, seed=seed)
    paths.warm_start.symlink_to(base)
    train, held_out = quickstart.prepare(paths, steps=40)
    command = quickstart.train_command(paths, train, held_out, extra)
    if "--reward.model_name_or_path" in extra:
        place = command.index("--reward.remote_url")
        del command[place : place + 2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    events = read_events(paths.tensorboard)
    for name in ("train/logprobs_diff", "train/outside_kept", "train/kl"):
        print(name, *(f"{event.value:.2e}" for event in events.get(name, [])[:3]))
    if "--ref.sync_steps" in extra:  # a step after a reset, and before the next one
        kl = {event.step: event.value for event in events["train/kl"]}
        print("train/kl", kl)
        assert max(abs(kl[step]) for step in (1, 11, 21, 31)) <= 1e-6 < kl[10]
    staleness = [event.value for event in events.get("rollout/staleness_max", [])]
    assert all(value <= 1 for value in staleness)
    accuracy_after = accuracy(paths.model, read_jsonl(held_out))
    print(f"{' '.join(extra)} seed {seed}: T=1 accuracy {accuracy_after:.3f}, staleness {max(staleness, default=0):g}")
    return accuracy_after


@pytest.mark.parametrize("name", list(VARIANTS))
def test_variant_learns(name: str, base: Path, reward_model: Path, tmp_path: Path) -> None:
    extra = [str(reward_model) if part == "RM" else part for part in VARIANTS[name].split()]
    assert train(tmp_path, base, extra, seed=1) >= 0.75


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("pipeline", list(PIPELINES))
def test_pipeline_learns_as_in_sync(pipeline: str, seed: int, base: Path, tmp_path: Path) -> None:
    assert train(tmp_path, base, PIPELINES[pipeline].split(), seed=seed) >= 0.75
