"""The supervised warm start, in plain PyTorch: a tiny model learns digit sorting from imperfect demonstrations.

More than half of the demonstrations are wrong, each in its own way. The model learns the distribution: its most likely
answer is right, yet a sample at temperature 1 is right less than half of the time. Raising that is left to RL.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from model import END, build_model, build_tokenizer, render_prompt
from task import draw_examples, imperfect_answer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

IGNORED = -100  # torch's cross_entropy skips targets with this value
RECORD = "warm_start.json"


@dataclass(frozen=True)
class WarmStart:
    """What decides the warm-started model. wrong: the share of demonstrations with swapped digits."""

    steps: int = 600
    batch_size: int = 64
    lr: float = 3e-3
    wrong: float = 0.6
    seed: int = 0


def demonstration_batch(tokenizer: PreTrainedTokenizerBase, settings: WarmStart, step: int) -> tuple[Tensor, Tensor]:
    """Input ids [B, T] and targets [B, T]; only the answer and its end mark are targets. All rows are equally long."""
    seed = settings.seed * 1_000_003 + step
    rng = random.Random(seed)
    prompts, answers = [], []
    for example in draw_examples(settings.batch_size, seed=seed):
        prompts.append(render_prompt(tokenizer, example.question))
        answers.append(imperfect_answer(example.answer, rng, settings.wrong) + END)
    prompt_ids = torch.tensor(tokenizer(prompts, add_special_tokens=False)["input_ids"])
    answer_ids = torch.tensor(tokenizer(answers, add_special_tokens=False)["input_ids"])
    ids = torch.cat([prompt_ids, answer_ids], dim=1)
    targets = torch.cat([torch.full_like(prompt_ids, IGNORED), answer_ids], dim=1)
    return ids, targets


def train(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    settings: WarmStart,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `model` in place: AdamW, 50 warm-up steps, then linear decay to a twentieth."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * max(0.05, 1 - step / settings.steps)
    )
    for step in range(settings.steps):
        ids, targets = demonstration_batch(tokenizer, settings, step)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step, loss.item())


def is_made(folder: Path, settings: WarmStart) -> bool:
    """True where `folder` holds the model that these settings make."""
    record = folder / RECORD
    return record.is_file() and json.loads(record.read_text(encoding="utf-8")) == asdict(settings)


def make_warm_start(
    folder: Path, settings: WarmStart, on_step: Callable[[int, float], None] = lambda step, loss: None
) -> None:
    """Build, train and save model and tokenizer into `folder`, replacing what is there.

    The folder appears under its name only when it is complete.
    """
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=settings.seed)
    train(model, tokenizer, settings, on_step)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / RECORD).write_text(json.dumps(asdict(settings)), encoding="utf-8")
    if (folder / RECORD).is_file():  # an earlier one; anything else stays, and the rename then fails
        shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
