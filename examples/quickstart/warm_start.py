"""The supervised warm start, in plain PyTorch: a tiny model learns digit sorting from imperfect demonstrations.

More than half of the demonstrations are wrong, each in its own way. The model learns the distribution: its most likely
answer is right, yet a sample at temperature 1 is right less than half of the time. Raising that is left to RL.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from model import END, build_model, build_tokenizer, render_prompt
from task import draw_examples, imperfect_answer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

IGNORED = -100  # torch's cross_entropy skips targets with this value
RECORD = "warm_start.json"
END_SECONDS = 10.0


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


def half_loss(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, settings: WarmStart, step: int, number: int
) -> Tensor:
    """What the first (number 0) or the second half of a batch adds to its mean loss."""
    ids, targets = demonstration_batch(tokenizer, settings, step)
    half = slice(number * len(ids) // 2, (number + 1) * len(ids) // 2)
    logits = model(input_ids=ids[half], use_cache=False).logits[:, :-1]
    wanted = targets[half, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum()


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

    with OtherHalf(model, lambda step: half_loss(model, tokenizer, settings, step, 1)) as other:
        for step in range(settings.steps):
            other.begin(step)
            loss = half_loss(model, tokenizer, settings, step, 0)
            loss.backward()
            other_loss = other.add_gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            on_step(step, loss.item() + other_loss)


class OtherHalf:
    """A fork of this process that computes the gradients of half of each batch, on the second core.

    A second thread does not help a model this small: its operations are over before the thread has woken up.
    """

    def __init__(self, model: torch.nn.Module, loss: Callable[[int], Tensor]) -> None:
        self._parameters = list(model.share_memory().parameters())
        self._gradients = [torch.zeros_like(p).share_memory_() for p in self._parameters]
        self._line, line = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._serve, args=(line, loss), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: numpy's, which the fork does not use
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        line.close()

    def __enter__(self) -> OtherHalf:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._process.join(END_SECONDS)
        self._process.kill()

    def begin(self, step: int) -> None:
        """Let it compute the gradients of a step, with the weights as they are."""
        self._line.send(step)

    def add_gradients(self) -> float:
        """Wait for them and add them to the model's own; their part of the loss."""
        try:
            loss = float(self._line.recv())
        except EOFError as error:
            raise RuntimeError("the process with half of the warm start ended, see its message above") from error
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad += gradient
        return loss

    def _serve(self, line: Connection, loss: Callable[[int], Tensor]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the first process
        self._line.close()
        with contextlib.suppress(EOFError):
            while True:
                value = loss(line.recv())
                for parameter in self._parameters:
                    parameter.grad = None
                value.backward()
                for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                    assert parameter.grad is not None
                    gradient.copy_(parameter.grad)
                line.send(value.item())


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
