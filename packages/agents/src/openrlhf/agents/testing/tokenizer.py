"""A tokenizer of bytes with a few special tokens and a small chat template; no files, reversible for valid UTF-8."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SPECIAL_TOKENS = ("<|user|>", "<|end|>", "<|assistant|>", "<|pad|>", "<|system|>", "<|tool|>")


class ByteTokenizer:
    """Ids 0-255 are bytes, then `SPECIAL_TOKENS`; `<|end|>` ends an answer."""

    name_or_path = "byte-tokenizer"
    chat_template = "built in"

    def __init__(self) -> None:
        self.special_ids = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
        self.special_names = {i: token.encode() for token, i in self.special_ids.items()}
        self.eos_token = "<|end|>"
        self.eos_token_id: int | None = self.special_ids["<|end|>"]
        self.pad_token_id = self.special_ids["<|pad|>"]
        self.bos_token_id: int | None = None
        self.vocab_size = 256 + len(SPECIAL_TOKENS)
        self._split = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written as text become their id. Nothing is ever added."""
        if "<|" not in text:
            return list(text.encode("utf-8", "surrogatepass"))
        ids: list[int] = []
        for part in self._split.split(text):
            special = self.special_ids.get(part)
            ids.extend([special] if special is not None else part.encode("utf-8", "surrogatepass"))
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, unknown ids `<id_N>`."""
        parts = []
        for i in token_ids:
            if i < 256:
                parts.append(bytes((i,)))
            elif not skip_special_tokens:
                parts.append(self.special_names.get(i) or f"<id_{i}>".encode())
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        """`<|role|>content<|end|>` per message. An append-only template."""
        text = "".join(f"<|{m['role']}|>{m.get('content') or ''}<|end|>" for m in messages)
        if add_generation_prompt:
            text += "<|assistant|>"
        return self.encode(text) if tokenize else text
