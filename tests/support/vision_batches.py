"""Batches with images for the learner's tests: made-up tokens and random pixels, no processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openrlhf.core.batch import Batch, pad_rows

GRIDS = ((4, 4), (4, 6), (8, 4))
MIXED = ((0, 1), (), (2,), (4,))
"""Images of each sample, by number: two, none, one, one."""


def image(family: str, number: int) -> tuple[list[int], dict[str, Tensor]]:
    """Tokens and random pixels of one image; the numbers have different sizes where the family knows sizes."""
    generator = torch.Generator().manual_seed(number)
    if family.startswith("qwen"):
        rows, columns = GRIDS[number % len(GRIDS)]
        width = 1176 if family == "qwen2_5_vl" else 384
        pixels = torch.randn(rows * columns, width, generator=generator)
        grid = torch.tensor([[1, rows, columns]])
        return [5] * (rows * columns // 4), {"pixel_values": pixels, "image_grid_thw": grid}
    token, side = {"llava": (3, 28), "internvl": (5, 56), "smolvlm": (3, 32)}[family]
    tiles = 1 if family == "llava" else 1 + number % 3
    pixels = torch.randn(tiles, 3, side, side, generator=generator)
    tensors = {"pixel_values": pixels}
    if family == "smolvlm":
        mask = torch.ones(tiles, 1, side, side, dtype=torch.bool)
        tensors = {"pixel_values": pixels[:, None], "pixel_attention_mask": mask}
    return [token] * (4 * tiles), tensors


def image_batch(family: str, images: Sequence[Sequence[int]] = MIXED) -> Batch:
    """One sample per entry, with these images; different lengths, three to six sampled tokens at the end."""
    samples, tensors = [], []
    for row, numbers in enumerate(images):
        prompt, parts = [40 + row], []
        for number in numbers:
            tokens, inputs = image(family, number)
            prompt += [30, *tokens, 50 + number]
            parts.append(inputs)
        samples.append(([*prompt, 60, 61], [70 + row * 5 + i for i in range(3 + row % 4)]))
        tensors.append({k: torch.cat([p[k] for p in parts]) for k in parts[0]} if parts else None)
    rows = [p + a for p, a in samples]
    width = max(map(len, rows))
    names = list(next(t for t in tensors if t is not None))
    return Batch(
        tokens=pad_rows(rows, width=width, value=0, dtype=torch.long),
        attention_mask=pad_rows([[1] * len(r) for r in rows], width=width, value=0, dtype=torch.bool),
        action_mask=pad_rows([[0] * len(p) + [1] * len(a) for p, a in samples], width=width, value=0, dtype=torch.bool),
        index=torch.arange(len(rows)),
        extra={k: [None if t is None else t[k] for t in tensors] for k in names},
    )


def probe_of(row: Batch) -> Batch:
    """A row with an image as `Learner.image_probe`: one token counts as sampled."""
    return row.with_(action_mask=row.action_mask & (row.action_mask.cumsum(1) == 1))
