"""A tiny reward model for the sorting task: Bradley-Terry on right answers against wrong ones."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from stages import wrong_answer
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def train_reward_model(base: Path, out: Path, *, render, steps: int = 800, seed: int = 0) -> float:
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
    """(digits, right answer, a wrong answer)."""
    digits = "".join(str(rng.randrange(10)) for _ in range(5))
    good = "".join(sorted(digits))
    return digits, good, wrong_answer(f"sort {digits}", good, rng)
