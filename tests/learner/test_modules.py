"""A model called the one right way: padding, packing, heads. In this process, without DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from openrlhf.core.batch import Batch
from openrlhf.learner.config import DsConfig, ModelConfig, OptimConfig
from openrlhf.learner.heads import LogitsHead, TokenHead
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule, rounded
from openrlhf.learner.packing import build_inputs, build_last_token_inputs
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.weights import checkpoint_buckets, metadata
from support.learner_models import make_batch, plain_logprobs, save_tiny_model
from support.plain_backend import PlainEngine

CPU = torch.device("cpu")
PLAIN = DsConfig(param_dtype="fp32", attn_implementation="sdpa")
ARCHITECTURES = ["qwen3", "llama", "gpt2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for arch in [*ARCHITECTURES, "cohere", "qwen3_moe"]:
        save_tiny_model(path / arch, arch, tie=arch != "llama")
    return path


def load(path: Path, role: Role = Role.POLICY, *, ds: DsConfig = PLAIN, **changes: Any) -> LearnerModule:
    spec = LearnerSpec(role=role, model_path=str(path), ds=ds, **changes)
    module = load_module(spec, CPU)
    module.check_head(CPU)
    return module


def logprobs(module: LearnerModule, batch: Batch, *, packed: bool) -> tuple[Tensor, Tensor]:
    inputs = build_inputs(batch, batch.action_mask, packed=packed)
    with torch.no_grad():
        readings = module(inputs, with_entropy=True)
    assert readings.entropy is not None
    return inputs.scatter(readings.primary, batch.tokens.shape), inputs.scatter(readings.entropy, batch.tokens.shape)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logprobs_and_entropy_equal_the_models_own_one_by_one(models: Path, arch: str, packed: bool) -> None:
    # B022, B023: neither padding nor neighbours in a packed row move a log-prob
    module, batch = load(models / arch, temperature=0.7), make_batch()
    assert isinstance(module.head, TokenHead)
    with torch.no_grad():
        want = plain_logprobs(_reload(models / arch), batch, 0.7)
    got = logprobs(module, batch, packed=packed)
    for g, w in zip(got, want, strict=True):
        assert float((g - w).abs().max()) < 1e-5


def _reload(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_neighbours_do_not_notice_a_change(models: Path, arch: str) -> None:
    # B023
    module, batch = load(models / arch), make_batch()
    tokens = batch.tokens.clone()
    tokens[1, 0] = (tokens[1, 0] + 1) % 100
    before, _ = logprobs(module, batch, packed=True)
    after, _ = logprobs(module, batch.with_(tokens=tokens), packed=True)
    others = [r for r in range(batch.size) if r != 1]
    assert float((before[1] - after[1]).abs().max()) > 1e-3
    assert torch.equal(before[others], after[others])


def test_packed_positions_restart() -> None:
    # B023
    lengths = torch.tensor([3, 2, 4])
    mask = torch.arange(4)[None] < lengths[:, None]
    batch = Batch(
        tokens=torch.arange(12).reshape(3, 4),
        attention_mask=mask,
        action_mask=mask & (torch.arange(4)[None] == 1),
        index=torch.arange(3),
    )
    inputs = build_inputs(batch, batch.action_mask, packed=True)
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert inputs.input_ids.tolist() == [[0, 1, 2, 4, 5, 8, 9, 10, 11]]
    assert inputs.select.tolist() == [0, 3, 5]
    assert inputs.targets.tolist() == [1, 5, 9]
    last = build_last_token_inputs(batch, packed=True)
    assert last.select.tolist() == [2, 4, 8]
    assert build_last_token_inputs(batch, packed=False).select.tolist() == [2, 5, 11]


def test_token_0_cannot_be_read() -> None:
    batch = make_batch(2)
    with pytest.raises(AssertionError, match="token 0"):
        build_inputs(batch, torch.ones_like(batch.action_mask), packed=False)


def test_batch_without_actions_still_runs_through_every_parameter(models: Path) -> None:
    # B005
    module, batch = load(models / "qwen3", optim=OptimConfig()), make_batch(2)
    inputs = build_inputs(batch, torch.zeros_like(batch.action_mask), packed=False)
    (module(inputs).primary.sum() * 0.0).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


def test_model_that_scales_its_logits_keeps_to_them(models: Path) -> None:
    module, batch = load(models / "cohere"), make_batch()
    assert isinstance(module.head, LogitsHead)
    with torch.no_grad():
        want = plain_logprobs(_reload(models / "cohere"), batch)
    got = logprobs(module, batch, packed=False)
    for g, w in zip(got, want, strict=True):
        assert float((g - w).abs().max()) < 1e-5


def test_balance_loss_of_a_mixture_of_experts(models: Path) -> None:
    module, batch = load(models / "qwen3_moe", aux_loss_coef=0.1, optim=OptimConfig()), make_batch()
    readings = module(build_inputs(batch, batch.action_mask, packed=False))
    packed = module(build_inputs(batch, batch.action_mask, packed=True))
    assert readings.aux_loss is not None
    assert packed.aux_loss is not None
    assert readings.aux_loss.item() == pytest.approx(packed.aux_loss.item(), abs=1e-5)  # padding does not count
    assert readings.aux_loss.item() > 0


@pytest.mark.parametrize("kernels", ["eager", "batched_mm", "grouped_mm"])
def test_kernels_of_the_experts_are_chosen_and_compute_the_same(models: Path, kernels: str) -> None:
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa", experts_implementation=kernels)  # pyright: ignore[reportArgumentType]
    module, batch = load(models / "qwen3_moe", ds=ds), make_batch()
    assert module.model.config._experts_implementation == kernels
    with torch.no_grad():
        want = plain_logprobs(_reload(models / "qwen3_moe"), batch)
    assert float((logprobs(module, batch, packed=False)[0] - want[0]).abs().max()) < 1e-5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_the_one_asked_for(models: Path, attention: str) -> None:
    ds = DsConfig(param_dtype="fp32", attn_implementation=attention)
    assert load(models / "qwen3", ds=ds).model.config._attn_implementation == attention


def test_stream_of_a_mixture_has_the_tensors_of_its_file(models: Path) -> None:
    # B128: transformers fuses the experts in memory, engines read the files' form
    engine = PlainEngine(load(models / "qwen3_moe", role=Role.REFERENCE))
    want = load_file(models / "qwen3_moe" / "model.safetensors")
    got = {name: t for bucket in checkpoint_buckets(engine, 10_000, skip_frozen=False) for name, t in bucket}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    shapes = {(info.name, info.shape) for info in metadata(engine, skip_frozen=False)}
    assert shapes == {(name, tuple(tensor.shape)) for name, tensor in want.items()}


def test_balance_loss_of_a_dense_model_is_an_error(models: Path) -> None:
    with pytest.raises(ValueError, match=r"`aux_loss_coef` 0\.1 needs a mixture of experts"):
        load(models / "qwen3", aux_loss_coef=0.1)


def test_dropout_is_off_in_training_mode(models: Path) -> None:
    module, batch = load(models / "gpt2", optim=OptimConfig()), make_batch()
    assert module.training
    first, _ = logprobs(module, batch, packed=False)
    second, _ = logprobs(module, batch, packed=False)
    assert torch.equal(first, second)


def calls_of(layer: torch.nn.Module) -> list[bool]:
    """Grows with every call of the layer: whether it kept what a backward pass needs."""
    seen: list[bool] = []
    layer.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(models: Path, reentrant: bool) -> None:
    gradients, passes = [], []
    for enable in (False, True):
        model = ModelConfig(gradient_checkpointing_enable=enable, gradient_checkpointing_reentrant=reentrant)
        module, batch = load(models / "qwen3", optim=OptimConfig(), model=model), make_batch()
        passes.append(calls_of(module.model.model.layers[0].mlp))
        module(build_inputs(batch, batch.action_mask, packed=False)).primary.sum().backward()
        gradients.append({n: p.grad for n, p in module.named_parameters()})
    # the layer runs again in the backward pass; the reentrant form keeps nothing at all of the first time
    assert passes == [[True], [not reentrant, True]]
    assert all(torch.allclose(gradients[0][n], gradients[1][n], atol=1e-5) for n in gradients[0])


def balance_gradients(path: Path, *, role: Role, checkpointing: bool, packed: bool) -> dict[str, Tensor | None]:
    model = ModelConfig(gradient_checkpointing_enable=checkpointing)
    module, batch = load(path, role, optim=OptimConfig(), model=model, aux_loss_coef=0.1), make_batch()
    readings = module(build_inputs(batch, batch.action_mask, packed=packed))
    assert readings.aux_loss is not None
    readings.aux_loss.backward()
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("role", [Role.POLICY, Role.CRITIC])
@pytest.mark.parametrize("packed", [False, True])
def test_n04_checkpointing_changes_no_gradient_of_the_balance_loss(models: Path, role: Role, packed: bool) -> None:
    want, got = (
        balance_gradients(models / "qwen3_moe", role=role, checkpointing=on, packed=packed) for on in (False, True)
    )
    routers = [name for name in want if "mlp.gate." in name]
    assert len(routers) == 2
    for name in routers:
        assert want[name] is not None
        assert float(want[name].abs().max()) > 1e-6  # pyright: ignore[reportOptionalMemberAccess]
    for name in want:
        assert (want[name] is None) == (got[name] is None)
        assert want[name] is None or torch.equal(want[name], got[name])  # pyright: ignore[reportArgumentType]


def test_n04_the_reentrant_form_is_refused_with_a_balance_loss(models: Path) -> None:
    model = ModelConfig(gradient_checkpointing_enable=True, gradient_checkpointing_reentrant=True)
    with pytest.raises(ValueError, match=r"checkpointing_reentrant` True and `aux_loss_coef` 0\.1: .*not be trained"):
        load(models / "qwen3_moe", optim=OptimConfig(), model=model, aux_loss_coef=0.1)
    load(models / "qwen3_moe", optim=OptimConfig(), model=model)
    load(models / "qwen3_moe", Role.REFERENCE, model=model, aux_loss_coef=0.1)


def test_frozen_model_has_no_gradient_and_is_in_eval_mode(models: Path) -> None:
    module = load(models / "qwen3", role=Role.REFERENCE)
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_model_that_separates_packed_samples_passes_the_check(models: Path, arch: str) -> None:
    # B023
    assert_packs = load(models / arch).check_packing
    assert_packs(CPU)


def test_model_that_mixes_packed_samples_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # B023: as if its attention ignored the restart of the positions
    module = load(models / "qwen3")
    backbone = module.model.base_model
    forward = backbone.forward

    def leaky(*args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        return forward(*args, position_ids=torch.arange(position_ids.shape[1])[None], **kwargs)

    monkeypatch.setattr(backbone, "forward", leaky)
    with pytest.raises(ValueError, match=r"'qwen3' models mix the samples.*`ds\.packing_samples`"):
        module.check_packing(CPU)


def test_layers_are_rounded_to_the_nearest_and_only_inside() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    values = torch.tensor([1.0, 1 + 1 / 128, 1 + 2 / 128, 1 + 3 / 128, -5 - 3 / 32, 0.0])
    for dtype in (torch.float32, torch.bfloat16):
        given = values.to(dtype)
        with rounded(model, 7):  # steps of 1/64 from 1 to 2; a half goes to the even neighbour
            assert model(given).tolist() == [1.0, 1.0, 1 + 1 / 64, 1 + 2 / 64, -5 - 1 / 8, 0.0]
        assert torch.equal(model(given), given)
    with rounded(model, 23):
        assert float(model(torch.tensor(1 + 2.0**-23))) == 1.0


def test_outputs_that_are_no_numbers_pass_through_rounding() -> None:
    model = nn.Sequential(nn.Identity())
    with rounded(model, 7):
        assert model((1, 2)) == (1, 2)
        assert model(torch.tensor([2**20 + 1])).tolist() == [2**20 + 1]
