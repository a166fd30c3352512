"""Tiny models for tests, built on the spot: `tiny_qwen3(path, tied=..., seed=...)`, `tiny_qwen3_moe(path)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

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


def _sizes(*, tied: bool) -> dict[str, Any]:
    """Two layers of width 64; head_dim 32 because vLLM's CPU attention takes no 16."""
    return {
        "vocab_size": 261,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,  # wider than usual: the tests need distributions far from uniform
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "bos_token_id": None,
        "pad_token_id": 0,
    }


def tiny_qwen3_config(*, tied: bool, **changes: Any) -> Qwen3Config:
    """The configuration of `tiny_qwen3`, with `changes`."""
    return Qwen3Config(**{**_sizes(tied=tied), **changes})


def tiny_qwen3(path: str | Path, tied: bool = True, seed: int = 0, **changes: Any) -> str:
    """Save a random fp32 Qwen3 with its tokenizer under `path`; returns the path as a string."""
    return _save_random(tiny_qwen3_config(tied=tied, **changes), path, seed)


def tiny_qwen3_moe(path: str | Path, seed: int = 0) -> str:
    """The same of a Qwen3 mixture, untied: 4 experts, 2 for each token.

    Experts are 48 wide, which vLLM's CPU kernel pads: it computes in steps of 32.
    """
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
    }
    return _save_random(Qwen3MoeConfig(**_sizes(tied=False), **experts), path, seed)


def _save_random(config: Any, path: str | Path, seed: int) -> str:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config).float()
    torch.set_rng_state(state)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)
