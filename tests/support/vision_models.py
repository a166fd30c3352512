"""Tiny vision-language models for tests, random, built on the spot: `tiny_vision(family, path)`.

Language models have head_dim 32: vLLM's CPU attention takes no 16.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.vision_qwen import qwen2_5_vl, qwen3_5, qwen3_vl
from support.vision_towers import internvl, llava, smolvlm

FAMILIES: dict[str, Callable[[float], tuple[Any, Callable[[], Any]]]] = {
    "qwen3_vl": qwen3_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_5": qwen3_5,
    "llava": llava,
    "internvl": internvl,
    "smolvlm": smolvlm,
}

NEEDED = {"smolvlm": "num2words"}
"""Packages that processors of transformers ask for."""

WITH_PROCESSOR = [family for family in FAMILIES if find_spec(NEEDED.get(family, "torch")) is not None]
EACH_PROCESSOR = [
    pytest.param(family, marks=pytest.mark.skipif(family not in WITH_PROCESSOR, reason=f"needs {NEEDED.get(family)}"))
    for family in FAMILIES
]


def vision_model(family: str, seed: int = 0) -> Any:
    """A random fp32 model of a family, without its processor, which may need torchvision."""
    return _build(family, seed, 0.1)[0]


def _build(family: str, seed: int, initializer_range: float) -> tuple[Any, Callable[[], Any]]:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model, processor = FAMILIES[family](initializer_range)
    torch.set_rng_state(state)
    return model.float(), processor


def tiny_vision(family: str, path: str | Path, seed: int = 0, initializer_range: float = 0.1) -> str:
    """Save a random fp32 model of a family with its processor under `path`; returns the path as a string.

    The wide initialisation gives distributions that are far from uniform and see the image.
    """
    model, processor = _build(family, seed, initializer_range)
    model.save_pretrained(path)
    processor().save_pretrained(path)
    if family == "llava":
        _old_tower_names(Path(path))
    return str(path)


def _old_tower_names(folder: Path) -> None:
    """The names of released checkpoints, which engines read; transformers 5 writes the tower without `vision_model`."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model.") if "vision_model" not in name else name: tensor
        for name, tensor in load_file(file).items()
        if "vision_tower." in name
    }
    others = {name: tensor for name, tensor in load_file(file).items() if "vision_tower." not in name}
    save_file({**weights, **others}, file, {"format": "pt"})


def image_file(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (32, 32)) -> str:
    """A PNG of one colour; returns its path."""
    from PIL import Image

    Image.new("RGB", size, colour).save(path)
    return str(path)
