"""The stages of the pipeline: the data each of them reads, the command it runs, and what it logged.

Everything is about the quickstart's task, sorting five digits, and its tiny model.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))  # its task and its model

from task import Example, draw_examples, imperfect_answer, write_jsonl

HELD_OUT_SEED = 12345
SFT_BATCH, PAIR_BATCH, ROLLOUT_BATCH = 64, 32, 16
SPOILED = 0.6
"""Share of wrong demonstrations: the model's samples shall leave room for the later stages."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Optimiser steps of the supervised stages (dpo at most reward_model), rollout steps of each RL stage, held-out
    questions.
    """

    sft: int = 600
    reward_model: int = 800
    rl: int = 20
    dpo: int = 250
    held_out: int = 512


MARK = ".pipeline"
"""In a folder that a pipeline made."""
MADE = ("base", "data", "sft", "reward_model", "rl_in_cluster", "rl_remote", "dpo")


@dataclass(frozen=True)
class Places:
    """Where the files of a run lie."""

    root: Path

    @property
    def base(self) -> Path:
        """The untrained model."""
        return self.root / "base"

    def data(self, name: str) -> Path:
        return self.root / "data" / f"{name}.jsonl"

    def model(self, stage: str) -> Path:
        return self.root / stage / "model"

    def metrics(self, stage: str) -> Path:
        return self.root / stage / "logs" / stage / "metrics.jsonl"


def clear(places: Places) -> None:
    """Remove what an earlier run of the pipeline made. Exits where the folder holds something else."""
    root = places.root
    if root.is_dir() and any(root.iterdir()) and not (root / MARK).is_file():
        raise SystemExit(f"--output {str(root)!r} holds files that no pipeline made: give another folder")
    for name in MADE:
        shutil.rmtree(root / name, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()


def write_data(places: Places, sizes: Sizes, seed: int) -> None:
    """Demonstrations, pairs of a right and a wrong answer, prompts; and held-out pairs and prompts."""
    held_out = draw_examples(sizes.held_out, seed=HELD_OUT_SEED)
    seen = {e.question for e in held_out}
    rng = random.Random(seed)
    demonstrations = draw_examples(sizes.sft * SFT_BATCH, seed=seed, exclude=seen)
    spoiled = [Example(question=e.question, answer=imperfect_answer(e.answer, rng, SPOILED)) for e in demonstrations]
    write_jsonl(places.data("sft"), spoiled)
    pairs = draw_examples(sizes.reward_model * PAIR_BATCH, seed=seed + 1, exclude=seen)
    _write_pairs(places.data("pairs"), pairs, rng)
    _write_pairs(places.data("held_out_pairs"), held_out, rng)
    write_jsonl(places.data("prompts"), draw_examples(sizes.rl * ROLLOUT_BATCH, seed=seed + 2, exclude=seen))
    write_jsonl(places.data("held_out"), held_out)


def wrong_answer(question: str, answer: str, rng: random.Random) -> str:
    """A wrong answer of one of six kinds. A policy finds every kind that a reward model has not seen."""
    while True:
        spoiled = _spoil(question.split()[-1], answer, rng)
        if spoiled != answer:
            return spoiled


def _spoil(digits: str, answer: str, rng: random.Random) -> str:
    kind, chars = rng.randrange(6), list(answer)
    if kind == 0:
        return imperfect_answer(answer, rng, 1.0)
    if kind == 1:  # sorted, with other digits
        for _ in range(rng.randint(1, len(chars))):
            chars[rng.randrange(len(chars))] = str(rng.randrange(10))
        return "".join(sorted(chars))
    if kind == 2:  # too long
        for _ in range(rng.randint(1, 4)):
            chars.insert(rng.randrange(len(chars) + 1), str(rng.randrange(10)))
        return "".join(chars)
    if kind == 3:  # too short
        return "".join(chars[: rng.randint(1, len(chars) - 1)])
    if kind == 4:
        return digits
    return "".join(str(rng.randrange(10)) for _ in range(rng.randint(1, 9)))


def _write_pairs(path: Path, examples: Sequence[Example], rng: random.Random) -> None:
    rows = [
        {"prompt": e.question, "chosen": e.answer, "rejected": wrong_answer(e.question, e.answer, rng)}
        for e in examples
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(module: str, places: Places, stage: str, flags: dict[str, object]) -> list[str]:
    """A training command that logs and exports into the stage's folder."""
    own = {
        "data.max_len": 64,
        "ckpt.output_dir": places.model(stage),
        "ckpt.path": places.root / stage / "checkpoints",
        "logger.tensorboard_dir": places.root / stage / "logs",
        "logger.wandb.run_name": stage,
    }
    words: list[str] = []
    for name, value in {**flags, **own}.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return [sys.executable, "-m", f"openrlhf.cli.{module}", *words, "--data.apply_chat_template"]


def sft_command(places: Places) -> list[str]:
    """Supervised fine-tuning of the untrained model on the demonstrations."""
    flags: dict[str, object] = {
        "model.model_name_or_path": places.base,
        "data.dataset": places.data("sft"),
        "data.input_key": "prompt",
        "data.output_key": "label",
        "train.batch_size": SFT_BATCH,
        "train.micro_batch_size": SFT_BATCH,
        "train.max_epochs": 1,
        "adam.lr": 3e-3,
        "logger.logging_steps": 10,
    }
    return command("train_sft", places, "sft", flags)


def reward_model_command(places: Places) -> list[str]:
    """A reward model that starts from the fine-tuned model, judged by held-out pairs."""
    return command("train_rm", places, "reward_model", _pair_flags(places, "sft", lr=2e-3))


def dpo_command(places: Places, start: str, steps: int) -> list[str]:
    """Preference training, on the reward model's pairs, of the model that the stage `start` made."""
    flags = _pair_flags(places, start, lr=2e-4) | {"data.max_samples": steps * PAIR_BATCH}
    return command("train_dpo", places, "dpo", flags)


def _pair_flags(places: Places, start: str, *, lr: float) -> dict[str, object]:
    return {
        "model.model_name_or_path": places.model(start),
        "data.dataset": places.data("pairs"),
        "data.prompt_key": "prompt",
        "eval.dataset": places.data("held_out_pairs"),
        "eval.split": "train",
        "train.batch_size": PAIR_BATCH,
        "train.micro_batch_size": PAIR_BATCH,
        "adam.lr": lr,
    }


def rl_command(places: Places, stage: str, start: str, reward: dict[str, object]) -> list[str]:
    """PPO with the rewards that the flags in `reward` name: a model in the cluster, or a server.

    The KL penalty and the normalised rewards keep the policy from answers that only the reward model likes. The policy
    waits for the critic, which begins far from rewards of this size; lambda 1, since the one reward comes at the end.
    """
    flags: dict[str, object] = {
        "actor.model_name_or_path": places.model(start),
        "data.prompt_dataset": places.data("prompts"),
        "data.input_key": "prompt",
        "data.label_key": "label",
        "actor.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "algo.advantage.estimator": "gae",
        "algo.advantage.lambd": 1.0,
        "algo.kl.init_coef": 0.02,
        "algo.kl.estimator": "k1",
        "ref.num_gpus_per_node": 1,
        "critic.num_gpus_per_node": 1,
        "critic.adam.lr": 1e-3,
        "critic.freezing_steps": 10,
        "actor.adam.lr": 5e-4,
        "reward.normalize_enable": True,
        "rollout.batch_size": ROLLOUT_BATCH,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": 10,
        "rollout.micro_batch_size": 64,
        "train.batch_size": 64,
        "train.micro_batch_size": 32,
    }
    return command("train_ppo_ray", places, stage, {**flags, **reward})


def in_cluster(places: Places) -> dict[str, object]:
    """Flags that load the reward model beside the policy."""
    return {"reward.model_name_or_path": places.model("reward_model"), "reward.num_gpus_per_node": 1}


def server_command(places: Places) -> list[str]:
    """The reward server, on a free port."""
    flags = ["--reward.model_name_or_path", str(places.model("reward_model")), "--port", "0", "--data.max_len", "64"]
    return [sys.executable, "-m", "openrlhf.cli.serve_rm", *flags]


def logged(places: Places, stage: str, name: str) -> list[float]:
    """All values of one metric that a stage logged, in order."""
    lines = map(json.loads, places.metrics(stage).read_text(encoding="utf-8").splitlines())
    values = [line[name] for line in lines if name in line]
    if not values:
        raise ValueError(f"stage {stage!r} logged no {name!r}")
    return values
