"""The peer: TRL's GRPOTrainer on the quickstart's task, model and batch sizes, in one process on CPU.

Runs in the environment that `run.sh` makes, not in ours. Prints one line of JSON.
usage: grpo.py MODEL_FOLDER TRAIN_JSONL ROLLOUT_STEPS
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAMPLES_PER_PROMPT = 8
SAMPLES_PER_STEP = 128
TRAIN_BATCH = 64
UPDATES_PER_STEP = SAMPLES_PER_STEP // TRAIN_BATCH


class Marks(TrainerCallback):
    """The time of every optimiser step and the rewards logged."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.times.append(time.perf_counter())

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


def exact_match(prompts, completions, label, **kwargs) -> list[float]:
    return [float(c[0]["content"] == wanted) for c, wanted in zip(completions, label, strict=True)]


def load_prompts(path: Path, steps: int) -> Dataset:
    lines = path.read_text(encoding="utf-8").splitlines()[: steps * SAMPLES_PER_STEP // SAMPLES_PER_PROMPT]
    rows = [json.loads(line) for line in lines]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": r["prompt"]}], "label": r["label"]} for r in rows]
    )


def main(model_folder: str, train_data: str, steps: int) -> None:
    started = time.perf_counter()
    torch.set_num_threads(2)
    marks = Marks()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=TRAIN_BATCH,
            gradient_accumulation_steps=1,
            generation_batch_size=SAMPLES_PER_STEP,
            num_generations=SAMPLES_PER_PROMPT,
            max_completion_length=10,
            temperature=1.0,
            beta=0.0,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            max_steps=UPDATES_PER_STEP * steps,
            logging_steps=UPDATES_PER_STEP,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=1,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            reward_funcs=exact_match,
            args=config,
            train_dataset=load_prompts(Path(train_data), steps),
            processing_class=AutoTokenizer.from_pretrained(model_folder, padding_side="left"),
            callbacks=[marks],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    ends = marks.times[UPDATES_PER_STEP - 1 :: UPDATES_PER_STEP]
    step_seconds = [b - a for a, b in pairwise(ends)]
    result = {
        "median_step_s": round(statistics.median(step_seconds), 3),
        "first_update_s": round(marks.times[0] - started, 1),
        "total_s": round(time.perf_counter() - started, 1),
        "reward_first": marks.rewards[0],
        "reward_last": marks.rewards[-1],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
