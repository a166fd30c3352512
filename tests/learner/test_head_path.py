"""Which models take log-probs in chunks: by class and configuration, the numbers only check it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from openrlhf.learner.head_path import NEUTRAL, check_plain_head, plain_head

SIZE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(family: str, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZE | settings)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("family", "settings", "plain"),
    [
        ("Qwen3", {}, True),
        ("Llama", {}, True),
        ("Gemma2", {"final_logit_softcapping": 30.0}, False),  # logits around 0.1: no tolerance sees the cap
        ("Gemma2", {"final_logit_softcapping": None}, True),
        ("Cohere", {"logit_scale": 0.0625}, False),
        ("Cohere", {"logit_scale": 1.0}, True),
        ("Granite", {"logits_scaling": 8.0}, False),
        ("Granite", {"logits_scaling": 1.0}, True),
    ],
)
def test_j_the_configuration_decides(family: str, settings: dict[str, Any], plain: bool) -> None:
    model = tiny(family, **settings)
    assert plain_head(model) is plain
    if plain:
        tokens = torch.arange(1, 5)[None]
        with torch.no_grad():
            check_plain_head(model, model.base_model(tokens).last_hidden_state, model(tokens).logits)


def test_j_classes_from_elsewhere_and_inner_heads_are_not_known() -> None:
    model = tiny("Qwen3")
    foreign = type("Mine", (type(model),), {"__module__": "transformers_modules.mine"})
    model.__class__ = foreign
    assert not plain_head(model)
    assert not plain_head(tiny("Electra", is_decoder=True, embedding_size=32))


@pytest.mark.parametrize("scale", [0.5, 1.2, float("nan")])
def test_j_a_head_that_is_not_plain_ends_the_start(scale: float) -> None:
    model = tiny("Llama")
    hidden = torch.randn(1, 4, 32)
    with torch.no_grad():
        logits = model.lm_head(hidden)
    check_plain_head(model, hidden, logits.bfloat16())
    with pytest.raises(ValueError, match="'llama' models change"):
        check_plain_head(model, hidden, logits * scale)
    assert isinstance(model.lm_head, nn.Linear)


def test_j_every_setting_that_transformers_has_is_listed() -> None:
    """What causal models of the installed transformers do to their logits names a setting, and we know it."""
    import ast
    import re
    from pathlib import Path

    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    unknown = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        source = file.read_text()
        if "logits = " not in source:
            continue
        for owner in ast.parse(source).body:
            if not isinstance(owner, ast.ClassDef) or owner.name not in set(CAUSAL.values()):
                continue
            text = ast.unparse(owner)
            if re.search(r"logits = logits [*/]|tanh\(logits", text) and not any(name in text for name in NEUTRAL):
                unknown.add(owner.name)
    assert unknown == set()
