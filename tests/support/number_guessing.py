"""The game of examples/python/agent_func_number_guessing.py: data, a warm-started tiny model and an independent judge.

Needs the quickstart's folder on sys.path (tests/proof/conftest.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from model import END, PAD, SPECIAL_TOKENS, build_model, build_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

NUMBERS, GUESSES, BLIND = 7, 3, 0.1  # BLIND: the share of demonstrated guesses that ignore the feedback
QUESTION = f"guess 1-{NUMBERS}"
START = f"<|user|>{QUESTION}{END}<|assistant|>"
MAX_NEW_TOKENS = 4
STEPS, BATCH, LR = 700, 64, 3e-3


def feedback(hint: str) -> str:
    return f"<|user|>{hint}{END}<|assistant|>"


def write_games(path: Path, count: int, seed: int) -> Path:
    """`count` prompts with a random number as label."""
    rng = random.Random(seed)
    rows = [json.dumps({"prompt": QUESTION, "label": str(rng.randint(1, NUMBERS))}) for _ in range(count)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def demonstration(rng: random.Random) -> list[tuple[str, bool]]:
    """One game as (text, is it a guess?): guesses within what the feedback left, some blind."""
    number, low, high = rng.randint(1, NUMBERS), 1, NUMBERS
    parts = [(START, False)]
    for turn in range(GUESSES):
        guess = rng.randint(1, NUMBERS) if rng.random() < BLIND else rng.randint(low, high)
        parts.append((f"{guess}{END}", True))
        if guess == number or turn == GUESSES - 1:
            break
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        parts.append((feedback("+" if guess < number else "-"), False))
    return parts


def demonstrations(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], padded on the right, and a mask [B, T] of the guesses."""
    rows = []
    for _ in range(BATCH):
        pairs = [
            (i, acts) for text, acts in demonstration(rng) for i in tokenizer.encode(text, add_special_tokens=False)
        ]
        rows.append(pairs)
    longest = max(map(len, rows))
    ids = torch.full((BATCH, longest), SPECIAL_TOKENS.index(PAD))
    mask = torch.zeros(BATCH, longest)
    for row, pairs in enumerate(rows):
        ids[row, : len(pairs)] = torch.tensor([i for i, _ in pairs])
        mask[row, : len(pairs)] = torch.tensor([float(acts) for _, acts in pairs])
    return ids, mask


def make_player(folder: Path, *, seed: int = 0) -> None:
    """Build, train on demonstrations and save a model that finds about six numbers in ten."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed).train()
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        ids, mask = demonstrations(tokenizer, rng)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # causal: padding on the right is not seen
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 30) * max(0.05, 1 - step / STEPS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def success(folder: Path, *, rounds: int = 146, seed: int = 0, greedy: bool = False) -> float:
    """The share of games won by the model in this folder at temperature 1 (or greedily), each number `rounds` times."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    games = {i: (START, 1 + i % NUMBERS) for i in range(NUMBERS * rounds)}
    won = 0
    for _ in range(GUESSES):
        texts = [text for text, _ in games.values()]
        batch = tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True, padding_side="left")
        options = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        out = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            **batch,
            do_sample=not greedy,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            **options,
        )
        answers = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :])
        left = {}
        for (game, (text, number)), answer in zip(games.items(), answers, strict=True):
            said, end, _ = answer.partition(END)
            valid = said.isascii() and said.isdigit()
            if valid and int(said) == number:
                won += 1
                continue
            hint = "?" if not valid else "+" if int(said) < number else "-"
            left[game] = (text + said + end + feedback(hint), number)
        games = left
    return won / (NUMBERS * rounds)
