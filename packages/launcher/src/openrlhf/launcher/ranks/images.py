"""Images of samples as the tensors that the model is called with, processed once per distinct image."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from openrlhf.core.batch import Batch

PROBE_SIZE = 64
"""Width and height in pixels of the picture that stands in for images in a micro-batch that has none."""


class ImageTensors(Protocol):
    """The part of `launcher.vision.ImageProcessor` that a rank uses."""

    def tokens(self, image: bytes) -> Sequence[int]: ...

    def tensors(self, image: bytes) -> dict[str, Tensor]: ...


def image_rows(rows: Sequence[Sequence[Any]], processor: ImageTensors) -> dict[str, list[Tensor | None]] | None:
    """Images per sample -> `Batch.extra`: for every model input one tensor per sample, None for one without images.

    The samples of a group share their images, so they share the tensors.
    """
    known: dict[bytes, dict[str, Tensor]] = {}
    for images in rows:
        for image in images:
            if image not in known:
                known[image] = processor.tensors(image)
    if not known:
        return None
    joined: dict[tuple[bytes, ...], dict[str, Tensor]] = {}
    names = list(next(iter(known.values())))
    extra: dict[str, list[Tensor | None]] = {name: [] for name in names}
    for images in map(tuple, rows):
        if images and images not in joined:
            parts = [known[image] for image in images]
            joined[images] = {name: torch.cat([p[name] for p in parts]) for name in names}
        for name in names:
            extra[name].append(joined[images][name] if images else None)
    return extra


def image_probe(processor: ImageTensors) -> Batch:
    """One row, a white picture, for `Learner.image_probe`."""
    out = BytesIO()
    Image.new("RGB", (PROBE_SIZE, PROBE_SIZE), "white").save(out, "PNG")
    content = out.getvalue()
    tokens = torch.tensor([[*processor.tokens(content), 0]])  # the token behind the picture is the one that is read
    action = torch.zeros_like(tokens, dtype=torch.bool)
    action[:, -1] = True
    return Batch(
        tokens=tokens,
        attention_mask=torch.ones_like(action),
        action_mask=action,
        index=torch.tensor([-1]),
        extra={name: [value] for name, value in processor.tensors(content).items()},
    )
