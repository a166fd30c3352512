"""Heads: which one a model gets (by class and configuration, the numbers only check it) and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from openrlhf.core.batch import Batch
from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig
from openrlhf.learner.heads import (
    NEUTRAL,
    LogitsHead,
    ScalarHead,
    TokenDistribution,
    TokenHead,
    at_temperatures,
    check_plain_head,
    plain_head,
    token_head,
)
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.packing import build_inputs
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch, save_tiny_model

CPU = torch.device("cpu")

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
def test_the_configuration_decides(family: str, settings: dict[str, Any], plain: bool) -> None:
    model = tiny(family, **settings)
    assert plain_head(model) is plain
    if plain:
        tokens = torch.arange(1, 5)[None]
        with torch.no_grad():
            check_plain_head(model, model.base_model(tokens).last_hidden_state, model(tokens).logits)


def test_classes_from_elsewhere_and_inner_heads_are_not_known() -> None:
    model = tiny("Qwen3")
    foreign = type("Mine", (type(model),), {"__module__": "transformers_modules.mine"})
    model.__class__ = foreign
    assert not plain_head(model)
    assert not plain_head(tiny("Electra", is_decoder=True, embedding_size=32))


@pytest.mark.parametrize("scale", [0.5, 1.2, float("nan")])
def test_a_head_that_is_not_plain_ends_the_start(scale: float) -> None:
    model = tiny("Llama")
    hidden = torch.randn(1, 4, 32)
    with torch.no_grad():
        logits = model.lm_head(hidden)
    check_plain_head(model, hidden, logits.bfloat16())
    with pytest.raises(ValueError, match="'llama' models change"):
        check_plain_head(model, hidden, logits * scale)
    assert isinstance(model.lm_head, nn.Linear)


def test_every_setting_that_transformers_has_is_listed() -> None:
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


def read(module: LearnerModule, batch: Batch, **options: Any) -> list[Any]:
    """Log-probs, entropy and gradients (which are left in the parameters)."""
    module.zero_grad()
    readings = module(build_inputs(batch, batch.action_mask, packed=False), with_entropy=True, **options)
    assert readings.entropy is not None
    (readings.primary.sum() + 0.3 * readings.entropy.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return [readings.primary.detach(), readings.entropy.detach(), gradients]


def load(path: Path, role: Role = Role.POLICY, *, lora: LoraConfig | None = None, **changes: Any) -> LearnerModule:
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", lora=lora or LoraConfig())
    spec = LearnerSpec(role=role, model_path=str(path), ds=ds, optim=OptimConfig(), **changes)
    return load_module(spec, CPU)


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("suppressed", [(), (5, 9)])
def test_tiles_and_logits_give_the_same(tmp_path: Path, suppressed: tuple[int, ...], entropy_gradient: bool) -> None:
    module = load(save_tiny_model(tmp_path, tie=False), temperature=0.7, suppressed_token_ids=suppressed)
    assert isinstance(module.head, TokenHead)
    tiles = read(module, make_batch(), entropy_gradient=entropy_gradient)
    module.head = LogitsHead()
    logits = read(module, make_batch(), entropy_gradient=entropy_gradient)
    for got, want in zip(tiles[:2], logits[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert tiles[2].keys() == logits[2].keys()
    for name, gradient in logits[2].items():
        torch.testing.assert_close(tiles[2][name], gradient, rtol=0, atol=1e-4)


def test_a_call_names_another_distribution_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    module = load(tmp_path, temperature=0.5, suppressed_token_ids=(5, 9))
    plain = load(tmp_path)
    before = read(module, make_batch())
    assert torch.equal(read(module, make_batch(), distribution=TokenDistribution())[0], read(plain, make_batch())[0])
    assert torch.equal(read(module, make_batch())[0], before[0])
    assert not torch.equal(before[0], read(plain, make_batch())[0])


@pytest.mark.parametrize("tie", [True, False])
def test_a_head_changes_nothing_of_the_model(tmp_path: Path, tie: bool) -> None:
    module = load(save_tiny_model(tmp_path, tie=tie))
    read(module, make_batch())
    layer = module.model.get_output_embeddings()
    assert type(layer) is nn.Linear
    assert "forward" not in vars(layer)
    assert layer(torch.zeros(1, 64)).shape == (1, 128)
    assert {name.partition(".")[0] for name in module.state_dict()} == {"model"}
    assert list(module.head.parameters()) == []
    assert isinstance(module.head, TokenHead)
    assert [id(p) for p in module.head.borrowed] == [id(layer.weight)]
    assert (layer.weight is module.model.get_input_embeddings().weight) is tie


def test_an_adapter_on_the_output_layer_is_part_of_the_logits(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    module = load(save_tiny_model(tmp_path, tie=False), lora=LoraConfig(rank=2, target_modules=("lm_head",)))
    assert isinstance(module.head, LogitsHead)
    gradients = read(module, make_batch())[2]
    assert gradients
    assert all("lm_head.lora_" in name for name in gradients)


def test_scalar_roles_have_a_scalar_head(tmp_path: Path) -> None:
    module = load(save_tiny_model(tmp_path), Role.CRITIC)
    assert isinstance(module.head, ScalarHead)
    assert module.scalar
    assert module.backbone is module.model
    assert module.hf_name("head.weight") == "score.weight"
    assert isinstance(token_head(tiny("Qwen3")), TokenHead)
    assert isinstance(token_head(tiny("Granite", logits_scaling=8.0)), LogitsHead)


def test_a_start_checks_the_head_by_numbers(tmp_path: Path) -> None:
    module = load(save_tiny_model(tmp_path, "cohere"))
    assert isinstance(module.head, LogitsHead)
    module.check_head(CPU)  # the model's own logits need no check
    module.head = TokenHead(module.model.get_output_embeddings())  # as if its scale were unknown
    with pytest.raises(ValueError, match="'cohere' models change"):
        module.check_head(CPU)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_model_keeps_its_configuration(tmp_path: Path, use_cache: bool) -> None:
    """What calls need they say themselves: a cache would let packed samples mix, and is asked for by no call."""
    file = save_tiny_model(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_cache": use_cache}))
    module = load(tmp_path)
    read(module, make_batch())
    module.check_head(CPU)
    assert module.model.config.use_cache is use_cache


def test_states_at_temperatures_of_their_own() -> None:
    layer = nn.Linear(4, 9, bias=False).double()
    states, targets = torch.randn(3, 4, dtype=torch.double), torch.tensor([1, 8, 0])
    temperatures = torch.tensor([0.0, 0.25, 2.0])
    own = TokenDistribution(0.5)
    logits = layer(states).detach()
    want = [float((logits[i] / t).log_softmax(-1)[targets[i]]) for i, t in enumerate((0.5, 0.25, 2.0))]
    for head, given in ((TokenHead(layer), states), (LogitsHead(), logits)):
        scaled = at_temperatures(head, given, temperatures, own.temperature)
        assert head(scaled, targets, distribution=own).logprobs.tolist() == pytest.approx(want, abs=1e-6)
    with pytest.raises(ValueError, match="an output layer with a bias"):
        at_temperatures(TokenHead(nn.Linear(4, 9)), states, temperatures, 1.0)
