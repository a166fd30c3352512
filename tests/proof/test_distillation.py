"""On-policy distillation by the real command line: a larger teacher, no rewards, the quickstart's task."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import run as quickstart
from evaluate import accuracy
from model import build_model, build_tokenizer
from report import read_events
from task import read_jsonl
from transformers import Qwen3Config, Qwen3ForCausalLM
from warm_start import WarmStart, make_warm_start, train

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(1800)]

WAYS = {
    "log-ratios": "--actor.adam.lr 1e-3 --rollout.batch_size 32 --train.num_episodes 2",
    "reverse over all": "--algo.distill.divergence reverse",
    "jsd over 16": "--algo.distill.divergence jsd --algo.distill.top_k 16",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`warm_start`, the student, and `teacher`: half again as wide, from demonstrations without faults."""
    folder = tmp_path_factory.mktemp("models")
    make_warm_start(folder / "warm_start", WarmStart())
    tokenizer = build_tokenizer()
    sizes = build_model(tokenizer).config.to_dict() | {"hidden_size": 96, "num_attention_heads": 4}
    teacher = Qwen3ForCausalLM(Qwen3Config.from_dict(sizes))
    train(teacher, tokenizer, WarmStart(wrong=0.0, seed=1))
    teacher.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    return folder


@pytest.mark.parametrize("way", list(WAYS))
def test_a_teacher_takes_the_student_along_without_a_reward(way: str, models: Path, tmp_path: Path) -> None:
    paths = quickstart.Paths(output=tmp_path, seed=1)
    paths.warm_start.symlink_to(models / "warm_start")
    prompts, held_out = quickstart.prepare(paths, steps=40)
    flags = f"--algo.advantage.estimator on_policy_distill --ref.model_name_or_path {models / 'teacher'}"
    extra = f"{flags} --ref.num_gpus_per_node 1 {WAYS[way]}".split()
    command = quickstart.train_command(paths, prompts, held_out, extra)
    place = command.index("--reward.remote_url")
    del command[place : place + 2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    examples = read_jsonl(held_out)
    of = {name: accuracy(path, examples) for name, path in
          {"teacher": models / "teacher", "before": models / "warm_start", "after": paths.model}.items()}  # fmt: skip
    events = read_events(paths.tensorboard)
    shown = ("train/kl", "train/distill_loss")
    curves = {name: [round(e.value, 4) for e in events[name]][::10] for name in shown if name in events}
    print(f"{way}: T=1 accuracy {of}, {curves}")
    assert len(events["timing/step_total"]) <= 40
    assert of["teacher"] >= 0.95
    assert of["after"] >= 0.93
