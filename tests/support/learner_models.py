"""Tiny models and batches for the learner's tests, and a plain PyTorch reference of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.core.batch import Batch

VOCAB = 128


def tiny_config(arch: str = "qwen3", *, tie: bool = True, vocab: int = VOCAB, hidden: int = 64) -> Any:
    from transformers import CohereConfig, GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

    size: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": tie,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if arch == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=2
        )
    if arch == "qwen3_next":  # linear attention in the first layer, full attention in the second
        linear = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
        sizes = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
        kinds = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
        return Qwen3NextConfig(**size, **linear, **sizes, **kinds)
    if arch == "qwen3_moe":
        moe: dict[str, Any] = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        }
        return Qwen3MoeConfig(**size, **moe)
    return {"qwen3": Qwen3Config, "llama": LlamaConfig, "cohere": CohereConfig}[arch](**size)


def save_tiny_model(path: Path, arch: str = "qwen3", *, seed: int = 0, **sizes: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(arch, **sizes))
    with torch.no_grad():  # away from the symmetric start: norms and biases too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return path


def make_batch(size: int = 8, *, seed: int = 0, longest: int = 20) -> Batch:
    """Samples of different lengths; environment tokens inside the actions; sample 2 has nothing trainable."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, longest + 1, (size,), generator=g)
    lengths[0] = longest
    attention = torch.arange(longest)[None] < lengths[:, None]
    actions = attention & (torch.arange(longest)[None] >= 3) & (torch.rand(size, longest, generator=g) > 0.2)
    if size > 2:
        actions[2] = False
    noise = {
        n: torch.randn(size, longest, generator=g) * actions for n in ("advantages", "old", "ref", "values", "ret")
    }
    return Batch(
        tokens=torch.randint(3, VOCAB, (size, longest), generator=g) * attention,
        attention_mask=attention,
        action_mask=actions,
        index=torch.arange(size),
        advantages=noise["advantages"],
        old_logprobs=(-4.85 + 0.3 * noise["old"]) * actions,
        ref_logprobs=(-4.85 + 0.3 * noise["ref"]) * actions,
        values=0.3 * noise["values"],
        returns=noise["ret"],
    )


def plain_logprobs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) [B, T] of a Hugging Face model, one sample at a time, by full logits."""
    logprobs, entropies = [], []
    width = batch.tokens.shape[1]
    for row in range(batch.size):
        length = int(batch.lengths[row])
        ids = batch.tokens[row : row + 1, :length]
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature, -1)
        mask = batch.action_mask[row, 1:length]
        token = logp.gather(-1, ids[0, 1:, None])[:, 0] * mask
        entropy = -(logp.exp() * logp).sum(-1) * mask
        pad = (1, width - length)
        logprobs.append(torch.nn.functional.pad(token, pad))
        entropies.append(torch.nn.functional.pad(entropy, pad))
    return torch.stack(logprobs), torch.stack(entropies)
