"""The dimensions of a transformer and its parameter count, from a local `config.json`. Loads no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.learner.config import LoraConfig

EXACT = frozenset({"qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "mixtral", "gpt2"})
"""Model types whose parameters are counted exactly; others are counted as Llama, which is close for decoders."""

QKV_BIAS = frozenset({"qwen2"})
QK_NORM = frozenset({"qwen3", "qwen3_moe"})


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder. experts and active_experts are 0 for a dense model."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    experts: int = 0
    active_experts: int = 0
    positions: int = 0
    has_vision: bool = False

    @property
    def exact(self) -> bool:
        """Whether the parameter count is exact and not an estimate."""
        return self.model_type in EXACT and not self.has_vision

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def embeddings(self) -> tuple[int, ...]:
        """Sizes of the token and position embeddings, and of the head if it is not tied to them."""
        tokens = self.vocab * self.hidden
        return (tokens,) * (1 if self.tied else 2) + ((self.positions * self.hidden,) if self.positions else ())

    @property
    def matrices(self) -> tuple[int, ...]:
        """Sizes of one layer's matrices; all experts of a kind are one."""
        query, key, wide = self.hidden * self.query_size, self.hidden * self.kv_size, self.hidden * self.intermediate
        if self.model_type == "gpt2":
            return query + 2 * key, query, wide, wide
        attention = (query, key, key, query)
        if self.experts:
            return *attention, self.hidden * self.experts, 2 * self.experts * wide, self.experts * wide
        return *attention, wide, wide, wide

    @property
    def linear(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Inputs and outputs of one layer's linear modules, by the last part of their name; experts are none."""
        hidden, query, key, wide = self.hidden, self.query_size, self.kv_size, self.intermediate
        if self.model_type == "gpt2":
            return {
                "c_attn": ((hidden, query + 2 * key),),
                "c_proj": ((query, hidden), (wide, hidden)),
                "c_fc": ((hidden, wide),),
            }
        attention = {
            "q_proj": ((hidden, query),),
            "k_proj": ((hidden, key),),
            "v_proj": ((hidden, key),),
            "o_proj": ((query, hidden),),
        }
        if self.experts:
            return attention
        return attention | {
            "gate_proj": ((hidden, wide),),
            "up_proj": ((hidden, wide),),
            "down_proj": ((wide, hidden),),
        }

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Parameters of all adapters: two factors per module, with DoRA also the lengths of its rows."""
        known = self.linear
        once = {"lm_head": ((self.hidden, self.vocab),), "embed_tokens": ((self.vocab, self.hidden),)}
        names = (
            list(known)
            if lora.target_modules == ("all-linear",)
            else [n.rpartition(".")[2] for n in lora.target_modules]
        )
        sizes = {True: 0, False: 0}
        for name in dict.fromkeys(names):
            for inputs, outputs in known.get(name) or once.get(name, ()):
                sizes[name in known] += lora.rank * (inputs + outputs) + (outputs if lora.dora else 0)
        return self.layers * sizes[True] + sizes[False]

    @property
    def vectors(self) -> tuple[int, ...]:
        """Sizes of one layer's norms and biases."""
        if self.model_type == "gpt2":  # two layer norms with bias, biases of qkv, projection and both MLP matrices
            return *(self.hidden,) * 4, 3 * self.hidden, self.hidden, self.intermediate, self.hidden
        vectors: tuple[int, ...] = (self.hidden, self.hidden)
        if self.model_type in QKV_BIAS:
            vectors += (self.query_size, self.kv_size, self.kv_size)
        if self.model_type in QK_NORM:
            vectors += (self.head_dim, self.head_dim)
        return vectors

    @property
    def final_norm(self) -> tuple[int, ...]:
        """Sizes of the last norm's parameters."""
        return (self.hidden,) * (2 if self.model_type == "gpt2" else 1)

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices."""
        return sum(self.matrices)

    @property
    def parameters(self) -> int:
        """All parameters of the language model."""
        return self.parameters_in_tensors(up_to=None)

    def parameters_in_tensors(self, *, up_to: int | None) -> int:
        """Parameters in tensors of at most so many elements (None: in all)."""
        layer, once = (*self.matrices, *self.vectors), (*self.embeddings, *self.final_norm)
        inside, outside = (sum(n for n in sizes if up_to is None or n <= up_to) for sizes in (layer, once))
        return self.layers * inside + outside

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_size * itemsize


def read_shape(path: str) -> ModelShape:
    """The shape of a local model. ValueError for a path without a readable `config.json`."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(
            f"{path!r} is no local model: plan downloads nothing; give a folder with the model's config.json"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    text = content.get("text_config", content)
    try:
        return _gpt2(text) if text.get("model_type") == "gpt2" else _decoder(text, "vision_config" in content)
    except KeyError as error:
        raise ValueError(f"{file}: the model's dimensions are incomplete: {error} is missing") from None


def _decoder(c: dict[str, Any], has_vision: bool) -> ModelShape:
    heads = c["num_attention_heads"]
    experts = c.get("num_experts") or c.get("num_local_experts") or 0
    return ModelShape(
        model_type=c.get("model_type", "unknown"),
        hidden=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        intermediate=c.get("moe_intermediate_size", c["intermediate_size"]) if experts else c["intermediate_size"],
        vocab=c["vocab_size"],
        tied=bool(c.get("tie_word_embeddings", False)),
        experts=experts,
        active_experts=c.get("num_experts_per_tok", 0) if experts else 0,
        has_vision=has_vision,
    )


def _gpt2(c: dict[str, Any]) -> ModelShape:
    hidden, heads = c["n_embd"], c["n_head"]
    return ModelShape(
        model_type="gpt2",
        hidden=hidden,
        layers=c["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=c.get("n_inner") or 4 * hidden,
        vocab=c["vocab_size"],
        tied=True,
        positions=c["n_positions"],
    )
