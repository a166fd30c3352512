"""A step whose prompts are computed once is the step in which every sample is computed whole."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.learner.attention import open_seam
from openrlhf.learner.config import DsConfig, LoraConfig, OptimConfig
from openrlhf.learner.learner import Learner
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.packing import build_inputs
from openrlhf.learner.shared_check import flex_works, ruled_out, sharing_problem
from openrlhf.learner.sharing import find_families
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import save_tiny_model
from support.learner_ranks import RankResults, result
from support.learner_sharing_cases import (
    ARCHITECTURES,
    AUX,
    LAYOUTS,
    check_same,
    save_sharing_models,
    sharing_batch,
)
from support.learner_step_cases import make_spec

CPU = torch.device("cpu")
PLAIN = DsConfig(param_dtype="fp32", attn_implementation="sdpa")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharing")
    save_sharing_models(path)
    for arch in ("gpt2", "cohere", "qwen3_next"):
        save_tiny_model(path / arch, arch)
    return path


def spec_of(path: Path, *, role: Role = Role.POLICY, **changes: Any) -> LearnerSpec:
    changes = {"ds": PLAIN, "optim": OptimConfig()} | changes
    return LearnerSpec(role=role, model_path=str(path), **changes)


def gradients(spec: LearnerSpec, batch: Batch, *, packed: bool = False, shared: bool = False) -> dict[str, Tensor]:
    """Readings and gradients of a weighted sum of them."""
    module = load_module(spec, CPU)
    assert sharing_problem(spec, module, CPU) is None
    families = find_families(batch) if shared else None
    readings = module(build_inputs(batch, batch.action_mask, packed=packed, families=families), with_entropy=True)
    weights = torch.linspace(0.5, 1.5, len(readings.primary))
    loss = (readings.primary * weights).mean()
    if readings.entropy is not None:
        loss = loss + (readings.entropy * weights).mean()
    if readings.aux_loss is not None:
        loss = loss + readings.aux_loss
    loss.backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"readings": readings.primary.detach(), "loss": loss.detach(), **found}


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC])
@pytest.mark.parametrize("arch", [*ARCHITECTURES, "gpt2", "cohere"])
def test_every_gradient_is_that_of_whole_samples(models: Path, arch: str, role: Role) -> None:
    spec = spec_of(models / arch, role=role, aux_loss_coef=AUX if arch == "mixture" else 0.0)
    want, got = (gradients(spec, sharing_batch(), shared=shared) for shared in (False, True))
    assert want.keys() == got.keys()
    for name in want:
        limit = 5e-6 if name == "readings" else 1e-6
        assert float((want[name] - got[name]).abs().max()) < limit, name


@pytest.mark.parametrize("arch", ["grouped", "window"])
def test_a_tail_sees_its_prefix_and_itself_alone(models: Path, arch: str) -> None:
    spec, batch = spec_of(models / arch), sharing_batch()
    module = load_module(spec, CPU)
    assert sharing_problem(spec, module, CPU) is None
    changed = batch.tokens.clone()
    changed[1, 22] = (changed[1, 22] + 1) % 100 + 3  # the third token of an answer
    found = []
    for tokens in (batch.tokens, changed):
        other = batch.with_(tokens=tokens)
        inputs = build_inputs(other, other.action_mask, packed=False, families=find_families(other))
        assert inputs.shared is not None
        with torch.no_grad():
            found.append(inputs.scatter(module(inputs).primary, tokens.shape))
    assert torch.equal(found[0][:, :22], found[1][:, :22])
    assert not torch.equal(found[0][1, 22:], found[1][1, 22:])
    others = [row for row in range(batch.size) if row != 1]
    assert torch.equal(found[0][others], found[1][others])


def test_a_group_is_scored_with_its_prompt_once(models: Path, seen_tokens: list[int]) -> None:
    batch = sharing_batch()
    for sharing in ("on", "off"):
        learner = _learner(models / "grouped", sharing)
        seen_tokens.clear()
        learner.score(batch)
        assert sum(seen_tokens) == (45 + 42 + 19 + 13 if sharing == "on" else batch.tokens.numel())


@pytest.fixture
def seen_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every call of a model."""
    seen: list[int] = []
    call = LearnerModule._call

    def counted(self: LearnerModule, model: Any, inputs: Any) -> Any:
        seen.append(inputs.input_ids.numel())
        return call(self, model, inputs)

    monkeypatch.setattr(LearnerModule, "_call", counted)
    return seen


def _learner(path: Path, sharing: Any, **changes: Any) -> Learner:
    spec = make_spec(path.parent, model=path.name, score_micro_batch_size=10)
    ds = replace(spec.ds, backend="support.plain_backend:build_plain")
    return Learner(replace(spec, ds=ds, batch=replace(spec.batch, share_prompt=sharing), **changes))


# -- where it is not exact


def problem(spec: LearnerSpec) -> str:
    found = sharing_problem(spec, load_module(spec, CPU), CPU)
    assert found is not None
    return found


def test_models_with_a_state_and_options_that_treat_samples_apart_are_left_out(models: Path) -> None:
    assert problem(spec_of(models / "qwen3_next")) == "its linear_attention layers carry a state from token to token"
    eager = replace(PLAIN, attn_implementation="eager")
    assert problem(spec_of(models / "grouped", ds=eager)) == "`ds.attn_implementation` 'eager' has no place for it"
    dropout = replace(PLAIN, lora=LoraConfig(rank=4, dropout=0.1))
    assert "`ds.lora.dropout`" in problem(spec_of(models / "grouped", ds=dropout))
    assert "`ds.deepcompile`" in problem(spec_of(models / "grouped", ds=replace(PLAIN, deepcompile=True)))
    flash = replace(PLAIN, attn_implementation="flash_attention_2")
    module = load_module(spec_of(models / "grouped"), CPU)
    assert ruled_out(spec_of(models / "grouped", ds=flash), module, CPU) is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # torch 2.13, on a CPU
def test_flex_attention_that_fails_is_left_for_grids(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = load_module(spec_of(models / "grouped"), CPU)
    with caplog.at_level(logging.INFO, "openrlhf.learner.shared_check"):
        assert not flex_works(module, CPU)  # on a CPU it has no backward pass
    assert "does not support backward on CPU" in caplog.text


def test_a_model_with_an_attention_of_its_own_is_found_out(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(models / "grouped")
    module = load_module(spec, CPU)
    layer = module.backbone.layers[1].self_attn
    forward = layer.forward

    def deaf(*args: Any, attend: object = None, **options: Any) -> Any:
        return forward(*args, **options)

    monkeypatch.setattr(layer, "forward", deaf)
    assert sharing_problem(spec, module, CPU) == "1 of its 2 layers hand their attention over"


def test_a_layer_that_hides_its_window_is_found_out(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(models / "window")
    module = load_module(spec, CPU)
    monkeypatch.setattr(module.backbone.layers[0].self_attn, "config", replace_window(module))
    assert sharing_problem(spec, module, CPU) == "its layers do not say which tokens they see"


def replace_window(module: LearnerModule) -> Any:
    """The model's configuration without its sliding window."""
    from copy import copy

    config = copy(module.model.config)
    config.sliding_window = None
    return config


def test_a_model_whose_numbers_change_is_found_out(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(models / "grouped")
    module = load_module(spec, CPU)
    backbone = module.backbone
    forward = backbone.forward

    def counts_on(*args: Any, position_ids: Tensor, **options: Any) -> Any:
        return forward(*args, position_ids=torch.arange(position_ids.shape[1])[None], **options)

    monkeypatch.setattr(backbone, "forward", counts_on)
    assert "its states differ by" in str(sharing_problem(spec, module, CPU))


def test_on_is_an_error_where_auto_says_why_not(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "openrlhf.learner.shared_check"):
        assert not _learner(models / "qwen3_next", "auto").shares_prompt
    assert [r.getMessage() for r in caplog.records if "computed whole" in r.getMessage()] == [
        f"policy {str(models / 'qwen3_next')!r}: every sample is computed whole: its linear_attention layers carry a "
        "state from token to token"
    ]
    with pytest.raises(ValueError, match=r"`batch\.share_prompt` 'on': .*linear_attention.*Fix: 'auto'"):
        _learner(models / "qwen3_next", "on")


def test_the_seam_leaves_calls_without_it_alone() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert open_seam("sdpa")
    wrapped: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert open_seam("sdpa")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is wrapped
    assert not open_seam("eager")
    q = torch.randn(1, 2, 3, 4)
    plain, ours = (call(nn.Identity(), q, q, q, None, scaling=0.5)[0] for call in (wrapped.plain, wrapped))
    assert torch.equal(plain, ours)


# -- on real ranks

RANK_CASES = {2: ["sharing"]}


@pytest.mark.ranks
@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["mixture", "norms"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_on_two_ranks_is_that_of_whole_samples(ranks: RankResults, arch: str, layout: str) -> None:
    for outcome in result(ranks, "sharing", 2):
        check_same(outcome[arch][layout], outcome[arch]["whole" if layout == "stage0" else "whole without balance"])
