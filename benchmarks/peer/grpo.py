"""The peer: TRL's GRPOTrainer on a job of `compare.py`, in one process on CPU with two threads.

Runs in the environment that `compare.py` makes, not in ours. After each rollout step it prints a line `@step {...}` and
waits for one on its standard input.
usage: grpo.py JOB_JSON
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import vowels
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

THREADS = 2
"""What is fastest for it on two cores, in both jobs."""


class Gate(TrainerCallback):
    """Reports every rollout step and waits for its turn. The step's metrics are logged after its end: one step late."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.metrics: dict[str, float] = {}

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        logs = logs or {}
        names = {"reward": "reward", "completions/mean_length": "length"}
        self.metrics = {ours: float(logs[name]) for name, ours in names.items() if name in logs}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.updates == 0:
            print("@step", json.dumps(self.metrics), flush=True)
            sys.stdin.readline()


def exact_match(prompts, completions, label, **kwargs) -> list[float]:
    return [float(c[0]["content"] == wanted) for c, wanted in zip(completions, label, strict=True)]


def share_of_vowels(prompts, completions, **kwargs) -> list[float]:
    return [vowels.share_of_vowels(c) for c in completions]


REWARDS = {"exact": exact_match, "vowels": share_of_vowels}


def load_prompts(path: Path, *, chat: bool) -> Dataset:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list(
        [{**row, "prompt": [{"role": "user", "content": row["prompt"]}] if chat else row["prompt"]} for row in rows]
    )


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(THREADS)
    samples = job["prompts"] * job["samples"]
    updates = samples // job["train_batch"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job["micro_batch"],
            gradient_accumulation_steps=job["train_batch"] // job["micro_batch"],
            generation_batch_size=samples,
            num_generations=job["samples"],
            max_completion_length=job["new_tokens"],
            temperature=1.0,
            beta=0.0,
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_steps=updates * job["steps"],
            logging_steps=updates,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=job["dtype"] == "bf16",
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=1,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
            reward_funcs=REWARDS[job["reward"]],
            args=config,
            train_dataset=load_prompts(Path(job["data"]), chat=job["prompt_tokens"] == 0),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            callbacks=[Gate(updates)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
