"""Loading tokenizers, the same way in every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openrlhf.launcher.vision import load_processor


def load_tokenizer(model: str, *, flag: str = "--actor.model_name_or_path") -> Any:
    """The model's tokenizer, padded on the left. Raises ValueError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, padding_side="left")
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {model!r}: no tokenizer could be loaded: {error}") from error


def chat_template(value: str) -> str:
    """`--data.tokenizer_chat_template`: a template, or the contents of the file that the value names.

    Raises ValueError for what is neither.
    """
    if "{" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise ValueError(
            f"--data.tokenizer_chat_template {value!r}: neither a template (it has no {{ }}) nor the path of a file"
        )
    return path.read_text("utf-8-sig")


def load_vision_tokenizer(model: str) -> tuple[Any, Any]:
    """(tokenizer, processor) of a vision-language model; the tokenizer has the processor's chat template."""
    processor = load_processor(model)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    return tokenizer, processor
