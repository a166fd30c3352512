"""A tiny reward model on disk: Qwen3 with a scalar head `score`, random weights, the byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForSequenceClassification

from support.tiny_models import byte_tokenizer, tiny_qwen3_config


def tiny_reward_model(path: Path, *, statistics: tuple[float, float] | None = None, **sizes: Any) -> str:
    """Save the model; `statistics` are the mean and std of its rewards. Returns the path."""
    config = tiny_qwen3_config(tied=True, num_labels=1, **sizes)
    if statistics is not None:
        config.mean, config.std = statistics
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForSequenceClassification(config).float().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)
