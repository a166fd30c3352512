"""Whether a language model's logits are exactly its head's, so that log-probs can be taken in chunks without logits.

Decided by the model's class and configuration, which are the same on every rank. A comparison of numbers only checks
the decision: a cap of 30 moves logits around 1 by less than any tolerance.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NEUTRAL: dict[str, float | None] = {
    "final_logit_softcapping": None,  # Gemma 2 to 4, NanoChat
    "logits_soft_cap": None,  # RecurrentGemma
    "output_logit_soft_cap": None,  # xLSTM
    "logit_scale": 1.0,  # Cohere
    "logits_scaling": 1.0,  # Granite, MiniCPM 3, HyperCLOVA X
    "lm_head_multiplier": 1.0,  # Falcon H1
    "output_multiplier": 1.0,
    "logits_mup_width_multiplier": 1.0,
    "unpadded_vocab_size": None,
}
"""Settings of transformers 5 between the last hidden state and the logits, and the value that does nothing."""
OWN_FORWARD = ("chameleon", "electra", "modernbert-decoder")
"""Model types that do something there without a setting."""
TOLERANCE = 0.05
"""Share of the largest logit by which two forward passes in bf16 may differ; a forgotten scale is far more."""


def plain_head(model: Any) -> bool:
    """Whether the class and the configuration of `model` say that its logits are `head(last_hidden_state)`.

    Classes from elsewhere than transformers are not known, nor heads that lie inside another module (BERT).
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not any(child is head for child in model.children()):
        return False
    config = model.config
    if not type(model).__module__.startswith("transformers.models.") or config.model_type in OWN_FORWARD:
        return False
    configs = (config, config.get_text_config())
    return not any(_acts(getattr(c, name, None), neutral) for c in configs for name, neutral in NEUTRAL.items())


def _acts(value: float | None, neutral: float | None) -> bool:
    return value is not None and value != neutral


def check_plain_head(model: Any, hidden: Tensor, logits: Tensor) -> None:
    """ValueError on all ranks when on any of them the head does not give the model's own logits. Collective."""
    with torch.no_grad():
        got = model.get_output_embeddings()(hidden).float()
    expected = logits.float()
    differs = not bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max())
    seen = torch.tensor(float(differs), device=hidden.device)
    if dist.is_initialized():
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    if float(seen):
        raise ValueError(
            f"{model.config.model_type!r} models change what their head gives before it becomes logits, in a way that "
            "is not known here: such a model cannot be trained; check that the model's files are complete"
        )
