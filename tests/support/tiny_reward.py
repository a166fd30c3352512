"""A tiny reward model for the sorting task: Bradley-Terry on right answers against wrong ones."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def train_reward_model(base: Path, out: Path, *, render, steps: int = 300, seed: int = 0) -> float:
    """Train a scalar head on `base` and save it; returns the accuracy on the last 10 batches of pairs.

    render: digits -> the prompt text.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    hits = []
    for _ in range(steps):
        pairs = [_pair(rng) for _ in range(32)]
        end = tokenizer.eos_token
        texts = [render(d) + good + end for d, good, _ in pairs] + [render(d) + bad + end for d, _, bad in pairs]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        scores = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
        difference = scores[:32] - scores[32:]
        loss = -logsigmoid(difference).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hits.append(float((difference > 0).float().mean()))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(hits[-10:]) / 10


def _pair(rng: random.Random) -> tuple[str, str, str]:
    """(digits, right answer, a wrong answer that a half-trained policy could give)."""
    while True:
        digits = "".join(str(rng.randrange(10)) for _ in range(5))
        good = "".join(sorted(digits))
        wrong = list(good)
        kind = rng.random()
        if kind < 0.6:
            for _ in range(rng.randint(1, 2)):
                i, j = rng.sample(range(5), 2)
                wrong[i], wrong[j] = wrong[j], wrong[i]
        elif kind < 0.8:
            wrong[rng.randrange(5)] = str(rng.randrange(10))
        else:
            wrong = list(digits[: rng.randint(1, 5)])
        bad = "".join(wrong)
        if bad != good:
            return digits, good, bad
