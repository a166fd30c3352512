"""A tokenizer of bytes with a few special tokens and a small chat template; no files, reversible for valid UTF-8."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SPECIAL_TOKENS = ("<|user|>", "<|end|>", "<|assistant|>", "<|pad|>", "<|system|>", "<|tool|>")


class Row(list[int]):
    """Token ids, which may be read like a tensor of them."""

    def tolist(self) -> list[int]:
        return list(self)


class ByteTokenizer:
    """Ids 0-255 are bytes, then the special tokens; `eos_token` ends an answer."""

    name_or_path = "byte-tokenizer"
    chat_template = "built in"

    def __init__(self, special_tokens: Sequence[str] = SPECIAL_TOKENS, eos_token: str = "<|end|>") -> None:
        self.special_ids = {token: 256 + i for i, token in enumerate(special_tokens)}
        self.special_names = {i: token.encode() for token, i in self.special_ids.items()}
        self.eos_token = eos_token
        self.eos_token_id: int | None = self.special_ids[eos_token]
        self.pad_token_id: int | None = self.special_ids.get("<|pad|>")
        self.bos_token_id: int | None = None
        self.vocab_size = 256 + len(special_tokens)
        self._split = re.compile("(" + "|".join(re.escape(token) for token in special_tokens) + ")")

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written as text become their id. Nothing is ever added."""
        if self._split.search(text) is None:
            return list(text.encode("utf-8", "surrogatepass"))
        ids: list[int] = []
        for part in self._split.split(text):
            special = self.special_ids.get(part)
            ids.extend([special] if special is not None else part.encode("utf-8", "surrogatepass"))
        return ids

    def __call__(self, text: str | Sequence[str], **kwargs: Any) -> dict[str, Any]:
        """{"input_ids", "attention_mask"} of a text or of several, as Hugging Face tokenizers give them.

        return_tensors: rows are lists with `tolist()`, whatever kind of tensor was asked for; no padding.
        """
        texts = [text] if isinstance(text, str) else list(text)
        rows = [Row(self.encode(t)) for t in texts]
        batched = kwargs.get("return_tensors") is not None or not isinstance(text, str)
        masks = [Row([1] * len(row)) for row in rows]
        return {"input_ids": rows if batched else rows[0], "attention_mask": masks if batched else masks[0]}

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
        """`<|role|>content<|end|>` per message, tools first, calls as `<tool_call>JSON</tool_call>`. Append-only."""
        text = f"<|tool|>{json.dumps(list(tools))}<|end|>" if tools else ""
        text += "".join(f"<|{m['role']}|>{m.get('content') or ''}{_calls(m)}<|end|>" for m in messages)
        if add_generation_prompt:
            text += "<|assistant|>"
        return self.encode(text) if tokenize else text


def _calls(message: Mapping[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return "".join(f"<tool_call>{json.dumps(function)}</tool_call>" for function in functions)
