"""What tiny vision-language models are made of: a tokenizer, and the sizes of the language model."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"


def vision_tokenizer(special: tuple[str, ...], names: dict[str, str] | None = None) -> Any:
    """Byte-level, without merges: pad 0, end of sequence 2."""
    from transformers import PreTrainedTokenizerFast

    symbols = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=special[0],
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        extra_special_tokens={"start_token": "<|im_start|>", **(names or {})},
    )


def text_config(tokenizer: Any, initializer_range: float, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": initializer_range,
        **changes,
    }
