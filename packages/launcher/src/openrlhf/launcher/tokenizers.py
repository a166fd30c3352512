"""Loading tokenizers, the same way in every process."""

from __future__ import annotations

from typing import Any


def load_tokenizer(model: str, *, fast: bool, flag: str = "--actor.model_name_or_path") -> Any:
    """The model's tokenizer, padded on the left. Raises ValueError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, use_fast=fast, padding_side="left")
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {model!r}: no tokenizer could be loaded: {error}") from error
