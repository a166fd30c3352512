"""Every family of vision-language models takes steps with the real command line; one is trained on text alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import report

from support.vision_models import EACH_PROCESSOR, image_file, tiny_vision

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(1500)]

BF16 = {"qwen3_5"}  # vLLM 0.32 on CPU: "CPU GDN attention requires BF16"
DYNAMIC = {"internvl": ("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "256")}
STEPS, PROMPTS, SAMPLES = 2, 4, 4
SYNC_ERROR = "rollout/sync_error"

REWARD = '''
def reward_func(queries, prompts, labels):
    """Never the same for all samples of a random model."""
    answers = [q[len(p):] for q, p in zip(queries, prompts)]
    return {"rewards": [sum(map(ord, a)) % 11 / 10 for a in answers]}
'''


def write_rows(folder: Path, *, images: bool) -> Path:
    """Prompts with 0, 1 and 2 images, or the same with none."""
    red = image_file(folder / "red.png", (220, 30, 30))
    blue = image_file(folder / "blue.png", (30, 30, 220), (48, 32))
    rows = []
    for number in range(STEPS * PROMPTS):
        own = [red, blue][: number % 3] if images else []
        content = [*({"type": "image"} for _ in own), {"type": "text", "text": f"colour {number}?"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "images": own, "label": "red"})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(model: str, folder: Path, *switches: str, max_images: int, rows: Path, dtype: str, returncode: int = 0) -> str:
    (folder / "reward.py").write_text(REWARD)
    flags: dict[str, object] = {
        "actor.model_name_or_path": model,
        "reward.remote_url": folder / "reward.py",
        "data.prompt_dataset": rows,
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.image_key": "images",
        "data.max_images_per_prompt": max_images,
        "data.max_len": 192,
        "rollout.max_new_tokens": 8,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 1e-3,
        "algo.kl.estimator": "k1",
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": 1,
        "ds.param_dtype": dtype,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.micro_batch_size": 4,
        "train.batch_size": PROMPTS * SAMPLES,
        "train.micro_batch_size": 4,
        "logger.tensorboard_dir": folder / "tensorboard",
        "ckpt.path": folder / "checkpoints",
        "ckpt.output_dir": folder / "model",
    }
    pairs = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    parts = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *pairs, "--data.apply_chat_template", *switches]
    done = subprocess.run(parts, capture_output=True, text=True, timeout=1200, check=False, cwd=folder)
    assert done.returncode == returncode, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def moved(model: str, exported: Path) -> dict[str, float]:
    """By how much training changed each tensor of the file; the names are those of the file it started from."""
    from safetensors.torch import load_file

    before, after = load_file(Path(model) / "model.safetensors"), load_file(exported / "model.safetensors")
    assert after.keys() == before.keys()
    return {name: float((after[name].float() - tensor.float()).abs().max()) for name, tensor in before.items()}


@pytest.mark.parametrize("family", EACH_PROCESSOR)
def test_family_trains_end_to_end(family: str, tmp_path: Path) -> None:
    model = tiny_vision(family, tmp_path / "tiny")
    dtype = "bf16" if family in BF16 else "fp32"
    rows = write_rows(tmp_path, images=True)
    run(model, tmp_path, *DYNAMIC.get(family, ()), max_images=2, rows=rows, dtype=dtype)
    events = report.read_events(tmp_path / "tensorboard")
    errors = [p.value for p in report.require(events, SYNC_ERROR)]
    print(f"{family}: {len(report.require(events, report.REWARD))} steps, sync errors {errors}")
    assert len(report.require(events, report.REWARD)) == STEPS
    changes = moved(model, tmp_path / "model")
    visual = {name for name in changes if "vis" in name}
    for names in (visual, changes.keys() - visual):  # in half precision a small change of some tensors is lost
        assert sum(changes[name] > 0 for name in names) > 0.8 * len(names)
    assert all(math.isfinite(change) for change in changes.values())


def test_text_alone(tmp_path: Path) -> None:
    """`--data.max_images_per_prompt 0`: the encoder stays as it is, and rows with images are an error."""
    model = tiny_vision("qwen3_vl", tmp_path / "tiny")
    run(model, tmp_path, max_images=0, rows=write_rows(tmp_path, images=False), dtype="fp32")
    assert len(report.require(report.read_events(tmp_path / "tensorboard"), report.REWARD)) == STEPS
    changes = moved(model, tmp_path / "model")
    assert all((changes[name] > 0) == ("visual" not in name) for name in changes if "norm" not in name)
    rows = write_rows(tmp_path, images=True)
    said = run(model, tmp_path, max_images=0, rows=rows, dtype="fp32", returncode=1)
    message = said.strip().splitlines()[-1]
    assert "rows.jsonl, line 2" in message
    assert "1 images in field 'images', but --data.max_images_per_prompt is 0" in message
    assert "Started a local Ray" not in said
