"""The colour-naming task: a tiny Qwen3-VL that names the colour of a noisy square, right less than half of the time.

Warm start in plain PyTorch on demonstrations of which most name a random colour; raising the rest is left to RL. With
`turns=2` a second picture follows the first answer, as in examples/python/vlm_multiturn_agent.py.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support.vision_models import tiny_vision
from support.vision_parts import END

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (220, 220, 30),
    "white": (235, 235, 235),
    "black": (20, 20, 20),
}
QUESTION = "colour?"
STEPS, BATCH, WRONG = 150, 32, 0.65
IGNORED = -100

REWARD = '''
def reward_func(queries, prompts, labels, **kwargs):
    """1 for the label alone."""
    return {"rewards": [float(r.removesuffix("<|im_end|>") == l) for r, l in zip(kwargs["responses"], labels)]}
'''


def square(colour: str, rng: np.random.Generator, size: int = 32) -> Image.Image:
    """A picture of one colour with noise."""
    pixels = np.array(COLOURS[colour])[None, None] + rng.normal(0, 25, (size, size, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype("uint8"))


def write_rows(folder: Path, count: int, seed: int, *, turns: int = 1) -> Path:
    """Pictures and the rows that name them, in the form of the guide. The label of two turns: two colours."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    rows = []
    for number in range(count):
        colours = rng.choices(list(COLOURS), k=turns)
        path = folder / f"{seed}-{number}.png"
        square(colours[0], noise).save(path)
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        row = {"prompt": [{"role": "user", "content": content}], "images": [str(path)], "label": " ".join(colours)}
        rows.append(row)
    file = folder / f"rows-{seed}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_namer(path: Path, *, turns: int = 1, steps: int = STEPS, seed: int = 0) -> str:
    """Build, warm-start and save the model; returns its path."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    tiny_vision("qwen3_vl", path, seed=seed, initializer_range=0.02)
    processor = AutoProcessor.from_pretrained(path)
    processor.tokenizer.padding_side = "right"
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * max(0.05, 1 - step / steps)
        inputs, targets = _demonstrations(processor, turns, rng, noise)
        logits = model(**inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return str(path)


def _demonstrations(
    processor: Any, turns: int, rng: random.Random, noise: np.random.Generator
) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of a batch and its targets [B, T]: the answers with their end marks."""
    texts, images = [], []
    for _ in range(BATCH):
        colours = rng.choices(list(COLOURS), k=turns)
        texts.append([(c if rng.random() > WRONG else rng.choice(list(COLOURS))) for c in colours])
        images.extend(square(c, noise) for c in colours)
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    dialogues = ["\n".join(prompt + answer + END for answer in answers) for answers in texts]
    inputs = processor(text=dialogues, images=images, return_tensors="pt", padding=True)
    targets = torch.full_like(inputs["input_ids"], IGNORED)
    end = processor.tokenizer.convert_tokens_to_ids(END)
    opening = processor.tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        inside = False
        for place, token in enumerate(ids):
            if inside:
                targets[row, place] = token
                inside = token != end
            elif ids[place + 1 - len(opening) : place + 1] == opening:
                inside = True
    return dict(inputs), targets


def accuracy(path: str, rows: Path, rounds: int = 4) -> float:
    """Share of right first answers at temperature 1."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    examples = [json.loads(line) for line in rows.read_text().splitlines()] * rounds
    prompts = [processor.apply_chat_template(e["prompt"], tokenize=False, add_generation_prompt=True) for e in examples]
    images = [Image.open(e["images"][0]) for e in examples]
    inputs = processor(text=prompts, images=images, return_tensors="pt", padding=True)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "suppress_tokens": [3, 4, 5, 6]}
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=10, **options)
    answers = processor.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [answer == example["label"].split()[0] for answer, example in zip(answers, examples, strict=True)]
    return sum(right) / len(right)
