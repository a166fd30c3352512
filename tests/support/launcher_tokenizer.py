"""Tokenizers for tests: one id per byte, plus special tokens, built in memory."""

from __future__ import annotations

import os
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}|{% endif %}{% for m in messages %}{{ m | tojson }}{% endfor %}"


def byte_tokenizer(*, adds_bos: bool = False, chat_template: str | None = None) -> Any:
    """A fast tokenizer with one id per byte; `adds_bos` puts <s> in front of plain text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    if adds_bos:
        bos = core.token_to_id("<s>")
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "</s>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


class PlacedTokenizer:
    """Gives a text one token in the process that made it, and two in any other."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0] * (1 if os.getpid() == self.home else 2) for _ in texts]}
