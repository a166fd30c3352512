"""Groups that share a prompt, on five kinds of models; the same step with and without, run by `learner_ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.core.batch import Batch, pad_rows
from openrlhf.core.config import PolicyLossConfig
from openrlhf.learner.config import ModelConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.objective import PolicyObjective
from support.learner_models import VOCAB
from support.learner_ranks import Case
from support.learner_step_cases import OBJECTIVE, Layout, capture_gradients, laid_out, make_spec, share

ARCHITECTURES = ("grouped", "tied", "window", "mixture", "norms")
"""Grouped keys; tied output layer and biases; sliding window; mixture of experts; norms of queries and keys, and layers
with and without a window."""
AUX = 0.1
"""Weight of the balance loss of `mixture`."""
WINDOW = 8

# name -> (stage, micro_batch_size, packed, token budget or None, rows of rank 0 out of 10 when there are two ranks)
LAYOUTS: dict[str, Layout] = {
    "stage0": (0, 10, False, None, [0, 1, 2, 3, 4]),
    "stage2-micro3": (2, 3, False, None, [0, 1, 2, 3, 4]),
    "stage3-dynamic": (3, 1, True, 60, [0, 2, 4, 5, 6, 9]),
    "stage3-checkpointing": (3, 4, False, None, [0, 1, 2, 3, 4]),
}
MORE_LAYOUTS: dict[str, Layout] = {
    "stage0-packed": (0, 10, True, None, [0, 1, 2, 3, 4]),
    "stage1-micro4": (1, 4, False, None, [0, 1, 2, 3, 4]),
    "stage1-dynamic": (1, 1, True, 60, [0, 1, 2, 3, 4]),
    "stage2-packed-micro3": (2, 3, True, None, [0, 1, 2, 3, 4]),
    "stage2-dynamic-padded": (2, 1, False, 60, [0, 1, 2, 3, 4]),
    "stage2-rank1-idle": (2, 10, False, None, list(range(10))),
    "stage3-rank0-idle": (3, 4, False, None, []),
    "stage3-packed": (3, 10, True, None, [0, 1, 2, 3, 4]),
}


def sharing_config(arch: str) -> Any:
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3MoeConfig

    size: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": arch in ("tied", "norms"),
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if arch == "window":
        return MistralConfig(**size, sliding_window=WINDOW)
    if arch == "mixture":
        experts: dict[str, Any] = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        }
        return Qwen3MoeConfig(**size, **experts)
    if arch == "norms":
        kinds = ["sliding_attention", "full_attention"]
        return Gemma3TextConfig(**size, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=16)
    return {"grouped": LlamaConfig, "tied": Qwen2Config}[arch](**size)


def save_sharing_models(path: Path) -> None:
    """One of every architecture, in a folder of its name."""
    from transformers import AutoModelForCausalLM

    for arch in ARCHITECTURES:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(sharing_config(arch))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(path / arch)


def rows_batch(rows: Sequence[Sequence[int]], actions: Sequence[Sequence[bool]], seed: int = 0) -> Batch:
    """A batch of these tokens, with random advantages and old log-probs."""
    g, width = torch.Generator().manual_seed(seed), max(map(len, rows))
    mask = pad_rows(actions, width=width, value=0, dtype=torch.bool)
    noise = [torch.randn(mask.shape, generator=g) * mask for _ in range(3)]
    return Batch(
        tokens=pad_rows(rows, width=width, value=0, dtype=torch.long),
        attention_mask=torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None],
        action_mask=mask,
        index=torch.arange(len(rows)),
        advantages=noise[0],
        old_logprobs=(-4.85 + 0.3 * noise[1]) * mask,
        ref_logprobs=(-4.85 + 0.3 * noise[2]) * mask,
    )


def sharing_batch() -> Batch:
    """Four samples of a prompt; three conversations that part in their second turn; two samples that are the same; one.

    An action is common to the conversations, and to the twins all are.
    """
    g = torch.Generator().manual_seed(5)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=g).tolist()

    rows: list[list[int]] = []
    actions: list[list[bool]] = []

    def add(parts: Sequence[tuple[list[int], bool]]) -> None:
        rows.append([token for tokens, _ in parts for token in tokens])
        actions.append([sampled for tokens, sampled in parts for _ in tokens])

    prompt, system, turn, other = draw(20), draw(9), draw(4), draw(12)
    for length in (5, 11, 1, 8):
        add([(prompt, False), (draw(length), True)])
    for length in (6, 2, 9):
        add([(system, False), (turn, True), (draw(length), False), (draw(4), True)])
    answer = draw(7)
    for _ in range(2):
        add([(other, False), (answer, True)])
    add([(draw(3), False), (draw(10), True)])
    return rows_batch(rows, actions)


def sharing_step(
    rank: int, world: int, folder: Path, *, arch: str, name: str, layout: Layout, sharing: str
) -> dict[str, Any]:
    """A score and a step of one model under one layout."""
    aux = AUX if arch == "mixture" and name.startswith("stage0") else 0.0
    spec = make_spec(folder, model=arch, aux_loss_coef=aux)
    spec = laid_out(spec, name, layout)
    spec = replace(
        spec,
        batch=replace(spec.batch, share_prompt=sharing),
        model=ModelConfig(gradient_checkpointing_enable="checkpointing" in name),
        score_micro_batch_size=5,
    )
    learner = Learner(spec)
    assert learner.shares_prompt == (sharing == "on")
    batch = share(sharing_batch(), layout[-1], rank, world)
    scores = learner.score(batch, with_entropy=True)
    gradients = capture_gradients(learner)
    objective = replace(OBJECTIVE, config=PolicyLossConfig(entropy_coef=0.01, aux_loss_coef=aux))
    assert isinstance(objective, PolicyObjective)
    metrics = learner.update(batch, objective)
    return {"scores": scores, "metrics": metrics, "gradients": gradients, "index": batch.index}


def check_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Scores, loss and every gradient of a step are those of another within 1e-6."""
    both = [row for row, index in enumerate(want["index"].tolist()) if index in got["index"].tolist()]
    place = [got["index"].tolist().index(want["index"].tolist()[row]) for row in both]
    width = min(got["scores"].logprobs.shape[1], want["scores"].logprobs.shape[1])
    for name in ("logprobs", "entropy"):
        ours, theirs = (getattr(step["scores"], name)[rows, :width] for step, rows in ((got, place), (want, both)))
        assert _largest(ours - theirs) < 5e-6, name
    for name, (total, count) in want["metrics"].items():
        assert got["metrics"][name][0] / count == pytest.approx(total / count, rel=1e-6, abs=1e-6), name
        assert got["metrics"][name][1] == count, name
    assert got["gradients"].keys() == want["gradients"].keys()
    for name, gradient in want["gradients"].items():
        assert _largest(got["gradients"][name] - gradient) < 1e-6, name


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def _case(architectures: Sequence[str], layouts: dict[str, Layout]) -> Case:
    def case(rank: int, world: int, folder: Path) -> dict[str, dict[str, Any]]:
        """Architecture -> layout (and `whole`: without sharing, on stage 0) -> outcome.

        The balance loss is a matter of the micro-batch: only layouts with one for all rows have it.
        """
        results: dict[str, dict[str, Any]] = {}
        for arch in architectures:
            results[arch] = {
                found: sharing_step(rank, world, folder, arch=arch, name=name, layout=LAYOUTS["stage0"], sharing="off")
                for found, name in (("whole", "stage0"), ("whole without balance", "whole"))
            }
            for name, layout in layouts.items():
                results[arch][name] = sharing_step(
                    rank, world, folder, arch=arch, name=name, layout=layout, sharing="on"
                )
        return results

    return case


CASES: dict[str, Case] = {
    "sharing": _case(("mixture", "norms"), LAYOUTS),
    "sharing_everywhere": _case(ARCHITECTURES, LAYOUTS | MORE_LAYOUTS),
}
