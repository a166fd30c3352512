"""What a model's Hugging Face configuration says about its layers, and which options they rule out. No tensors here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

RECURRENT = frozenset({"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "recurrent"})
"""Layer types that carry a state from token to token, also from one sample of a packed row into the next."""

RECURRENT_MODELS = frozenset({"rwkv", "xlstm"})
"""Models with such layers whose configuration does not list them."""


def num_experts(config: Any) -> int:
    """Experts per layer of a mixture-of-experts configuration, 0 for a dense model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 0


def recurrent_layers(config: Any) -> list[str]:
    """The kinds of layers in the model that do not start anew with a sample; empty for plain attention."""
    text = config.get_text_config()
    return sorted(set(_layer_types(text)) & RECURRENT | ({text.model_type} & RECURRENT_MODELS))


def _layer_types(config: Any) -> Iterator[str]:
    for name in ("layer_types", "layers_block_type"):
        yield from getattr(config, name, None) or ()


def check_packing(config: Any, model: str) -> None:
    """ValueError when samples in one row would leak into each other.

    config: the Hugging Face configuration of `model`, which is named in the message.
    """
    found = recurrent_layers(config)
    if found:
        raise ValueError(
            f"{model!r} has {', '.join(found)} layers, which carry a state from one packed sample into the next: "
            "leave `ds.packing_samples` and `batch.dynamic_batch_enable` out"
        )
