"""Random Qwen3 models with a byte tokenizer, made on the spot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openrlhf.core.batch import Batch

SPECIAL = ("<|pad|>", "<|end|>")
END, PAD = 1, 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


TINY = Shape(vocab=320, hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, intermediate=192)
"""head_dim 32: vLLM's attention on CPU takes no 16."""
WIDE = Shape(vocab=2048, hidden=256, layers=4, heads=4, kv_heads=4, head_dim=64, intermediate=1024)
WIDE_ON_GPU = Shape(vocab=32_768, hidden=1024, layers=4, heads=16, kv_heads=8, head_dim=64, intermediate=4096)
"""Large enough that a push takes longer than its messages."""
SIZE_0_6B = Shape(vocab=151_936, hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072)
"""The shape of Qwen3-0.6B."""


def make_model(folder: Path, shape: Shape = TINY, *, tied: bool = True, seed: int = 0, dtype: str = "fp32") -> str:
    """Save a random model under `folder`, which must not exist; returns its path."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.02 if shape == SIZE_0_6B else 0.1,  # wide: distributions far from uniform show more
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if dtype == "bf16" else torch.float32).save_pretrained(folder)
    _write_tokenizer(folder)
    return str(folder)


def _write_tokenizer(folder: Path) -> None:
    """A token per byte-level symbol: engines want a tokenizer, the check speaks in ids."""
    words = [*SPECIAL, *(chr(0x100 + i) for i in range(256))]
    added = [
        {"id": i, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(SPECIAL)
    ]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": words[2]}
    content = {"version": "1.0", "added_tokens": added, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[END], "pad_token": SPECIAL[PAD]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def make_batch(lengths: tuple[int, ...], *, vocab: int = 256, seed: int = 0, prompt: int = 3) -> Batch:
    """Random rows of these lengths; all but the first `prompt` tokens of each are trained on."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    tokens = torch.randint(2, vocab, shape, generator=generator)
    places = torch.arange(shape[1])[None]
    mask = places < torch.tensor(lengths)[:, None]
    action = mask & (places >= prompt)
    return Batch(tokens=tokens * mask, attention_mask=mask, action_mask=action, index=torch.arange(len(lengths)))
