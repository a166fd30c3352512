"""A tiny vision-language model learns to name colours with the real command line: the guide's keys and flags."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import report

from support.colours import REWARD, accuracy, make_namer, square, write_rows
from support.vision_models import tiny_vision

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(3600)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
PROMPTS, SAMPLES, STEPS = 12, 8, 120
FROZEN_STEPS = 180
FROZEN = ("--actor.freeze_visual_encoder",)
"""Fewer weights learn more slowly."""


@pytest.fixture(scope="module")
def namer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_namer(tmp_path_factory.mktemp("namer"))


@pytest.fixture(scope="module")
def pair_namer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_namer(tmp_path_factory.mktemp("pair_namer"), turns=2, steps=200)


def command(model: str, rows: Path, folder: Path, source: dict[str, object], *switches: str) -> list[str]:
    flags: dict[str, object] = {
        "actor.model_name_or_path": model,
        **source,
        "data.prompt_dataset": rows,
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.image_key": "images",
        "data.max_len": 128,
        "rollout.max_new_tokens": 10,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 0,
        "vllm.num_engines": 1,
        "actor.adam.lr": 7e-4,  # at twice that the reward swings, and how one kind of processor rounds decides
        "actor.lr_scheduler": "constant_with_warmup",
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.micro_batch_size": 96,
        "train.batch_size": PROMPTS * SAMPLES,
        "train.micro_batch_size": 96,
        "logger.tensorboard_dir": folder / "tensorboard",
        "ckpt.path": folder / "checkpoints",
        "ckpt.output_dir": folder / "model",
    }
    pairs = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *pairs, "--data.apply_chat_template", *switches]


def run(parts: list[str], folder: Path) -> list[float]:
    """Runs the command to its end; the mean reward of every step."""
    done = subprocess.run(parts, capture_output=True, text=True, timeout=1500, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return [p.value for p in report.require(report.read_events(folder / "tensorboard"), report.REWARD)]


@pytest.mark.parametrize("freeze", [False, True])
def test_colour_naming_improves(namer: str, tmp_path: Path, freeze: bool) -> None:
    steps = FROZEN_STEPS if freeze else STEPS
    rows, held_out = write_rows(tmp_path / "data", PROMPTS * steps, 1), write_rows(tmp_path / "data", 60, 2)
    (tmp_path / "reward.py").write_text(REWARD)
    before = accuracy(namer, held_out)
    source: dict[str, object] = {"reward.remote_url": tmp_path / "reward.py", "data.max_images_per_prompt": 1}
    rewards = run(command(namer, rows, tmp_path, source, *(FROZEN if freeze else ())), tmp_path)
    after = accuracy(str(tmp_path / "model"), held_out)
    print(f"frozen {freeze}: {before:.3f} -> {after:.3f}; reward {[round(r, 3) for r in rewards[::6]]}")
    assert before <= 0.45
    assert after >= 0.8


def test_two_pictures_improve(pair_namer: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data", PROMPTS * STEPS, 3, turns=2)
    source: dict[str, object] = {
        "train.agent_func_path": EXAMPLES / "vlm_multiturn_agent.py",
        "data.max_images_per_prompt": 2,
    }
    rewards = run(command(pair_namer, rows, tmp_path, source), tmp_path)
    print(f"two pictures: reward {[round(r, 3) for r in rewards[::6]]}")
    assert sum(rewards[:3]) / 3 <= 0.45
    assert sum(rewards[-5:]) / 5 >= 0.8


def test_guide_command_runs_as_written(tmp_path: Path) -> None:
    """The guide's row and flags with a local model of the guide's family; only sizes are smaller."""
    model = tiny_vision("qwen3_5", tmp_path / "Qwen3.5-tiny")
    image = tmp_path / "image.png"
    square("red", np.random.default_rng(0), 64).save(image)
    content = [{"type": "image"}, {"type": "text", "text": "Find x."}]
    row = {"prompt": [{"role": "user", "content": content}], "images": [str(image)], "label": "3"}
    (tmp_path / "geometry.jsonl").write_text((json.dumps(row) + "\n") * 8)
    guide = f"""
        --actor.model_name_or_path {model}
        --reward.remote_url {EXAMPLES / "math_reward_func.py"}
        --data.prompt_dataset {tmp_path / "geometry.jsonl"}
        --data.input_key prompt
        --data.label_key label
        --data.image_key images
        --data.max_images_per_prompt 1
        --actor.freeze_visual_encoder
        --data.max_len 128
        --rollout.max_new_tokens 32
        --algo.advantage.estimator reinforce_baseline
        --train.colocate_all
        --vllm.gpu_memory_utilization 0.7
        --data.apply_chat_template
        --ds.attn_implementation eager
        --ds.param_dtype bf16
    """
    rest = f"""
        --vllm.num_engines 1
        --rollout.batch_size 4
        --rollout.n_samples_per_prompt 2
        --train.batch_size 8
        --logger.tensorboard_dir {tmp_path / "tensorboard"}
        --ckpt.path {tmp_path / "checkpoints"}
        --ckpt.output_dir {tmp_path / "model"}
    """
    parts = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *guide.split(), *rest.split()]
    assert len(run(parts, tmp_path)) == 2
    exported = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "processor_config.json", "tokenizer.json"} <= exported
