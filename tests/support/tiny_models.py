"""Tiny models for tests, built on the spot: `tiny_qwen3(path, tied=..., seed=...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges: 5 special tokens (pad 0, end of sequence 1) and 256 bytes, 261 ids."""
    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_qwen3_config(*, tied: bool, **changes: Any) -> Qwen3Config:
    """Two layers of width 64; head_dim 32 because vLLM's CPU attention takes no 16."""
    sizes: dict[str, Any] = {
        "vocab_size": 261,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": 512,
        **changes,
    }
    # A wider initialisation than usual: the tests need distributions far from uniform.
    return Qwen3Config(
        **sizes, tie_word_embeddings=tied, initializer_range=0.1, eos_token_id=1, bos_token_id=None, pad_token_id=0
    )


def tiny_qwen3(path: str | Path, tied: bool = True, seed: int = 0) -> str:
    """Save a random fp32 Qwen3 with its tokenizer under `path`; returns the path as a string."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_qwen3_config(tied=tied)).float()
    torch.set_rng_state(state)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)
