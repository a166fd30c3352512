"""Vision-language models in the learner: images of a batch, tokens without probability, a frozen encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.learner.config import DsConfig, OptimConfig
from openrlhf.learner.heads import LogitsHead, TokenHead
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.packing import build_inputs, with_probe
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.weights import metadata
from support.plain_backend import PlainEngine
from support.vision_batches import image_batch, probe_of
from support.vision_models import FAMILIES, vision_model

CPU = torch.device("cpu")
SUPPRESSED = (3, 4, 5, 6)
# Of the largest gradient. Layers of linear attention work in chunks whose borders move with the padding: more rounding;
# so has a sum over many tiles.
TOLERANCE = {"qwen3_5": 1e-5, "internvl": 2e-6}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for family in FAMILIES:
        vision_model(family).save_pretrained(folder / family)
    return folder


def load(path: Path, **changes: Any) -> LearnerModule:
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa")
    module = load_module(LearnerSpec(role=Role.POLICY, model_path=str(path), ds=ds, **changes), CPU)
    module.check_head(CPU)
    return module


def logprobs(module: LearnerModule, batch: Batch) -> Tensor:
    inputs = build_inputs(batch, batch.action_mask, packed=False)
    return inputs.scatter(module(inputs).primary, batch.tokens.shape)


def gradients(module: LearnerModule, batches: list[Batch]) -> dict[str, Tensor]:
    module.zero_grad()
    for batch in batches:
        logprobs(module, batch).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_gradients_of_a_mixed_batch_equal_those_one_by_one(models: Path, family: str) -> None:
    module = load(models / family, optim=OptimConfig(), suppressed_token_ids=SUPPRESSED[:3])
    batch = image_batch(family)
    together = gradients(module, [batch])
    alone = gradients(module, [batch.select([row]) for row in range(batch.size)])
    assert together.keys() == alone.keys()
    assert any("vis" in name for name in together)
    scale = max(float(g.abs().max()) for g in alone.values())
    worst = max(float((together[n] - alone[n]).abs().max()) for n in alone)
    assert worst / scale < TOLERANCE.get(family, 1e-6)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_images_move_the_log_probs(models: Path, family: str) -> None:
    module, batch = load(models / family), image_batch(family)
    assert batch.extra is not None
    darker = batch.with_(
        extra={**batch.extra, "pixel_values": [None if t is None else t - 1 for t in batch.extra["pixel_values"]]}
    )
    with torch.no_grad():
        moved = (logprobs(module, batch) - logprobs(module, darker)).abs().amax(1)
    assert moved[1] == 0.0
    assert (moved[[0, 2, 3]] > 1e-4).all()


@pytest.mark.parametrize("chunked", [True, False])
def test_suppressed_tokens_have_no_probability(models: Path, chunked: bool) -> None:
    module = load(models / "qwen3_vl", suppressed_token_ids=SUPPRESSED, temperature=0.7)
    assert isinstance(module.head, TokenHead)
    if not chunked:
        module.head = LogitsHead()
    batch = image_batch("qwen3_vl").select([1])
    inputs = build_inputs(batch, batch.action_mask, packed=False)
    with torch.no_grad():
        readings = module(inputs, with_entropy=True)
        plain = vision_model("qwen3_vl").eval()(input_ids=batch.tokens).logits[0, inputs.select] / 0.7
    plain[:, list(SUPPRESSED)] = float("-inf")
    want = plain.log_softmax(-1)
    torch.testing.assert_close(readings.primary, want.gather(1, inputs.targets[:, None])[:, 0], rtol=0, atol=1e-5)
    entropy = -(want.exp() * want.clamp_min(-1e4)).sum(-1)
    torch.testing.assert_close(readings.entropy, entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_frozen_encoder_is_neither_trained_nor_sent(models: Path, family: str) -> None:
    module = load(models / family, optim=OptimConfig(), freeze_visual_encoder=True)
    engine = PlainEngine(module)
    sent = {info.name for info in metadata(engine, skip_frozen=True)}
    everything = {info.name for info in metadata(engine, skip_frozen=False)}
    assert sent < everything
    assert not any("vis" in name or "projector" in name for name in sent)
    assert any("vis" in name for name in everything - sent)
    trained = gradients(module, [image_batch(family)])
    text = ("language_model", "text_model", "lm_head")
    assert trained
    assert all(any(part in name for part in text) for name in trained)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_probe_visits_the_encoder_and_changes_no_gradient(models: Path, family: str) -> None:
    module, batch = load(models / family, optim=OptimConfig()), image_batch(family)
    text, probe = batch.select([1]).with_(extra=None), probe_of(batch.select([2]))
    plain = gradients(module, [text])
    module.zero_grad()
    inputs = with_probe(text, probe)
    got = inputs.scatter(module(inputs).primary, text.tokens.shape)
    got.sum().backward()
    probed = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert not any("vis" in name for name in plain)
    visual = [g for name, g in probed.items() if name not in plain]
    assert visual
    assert all(not g.any() for g in visual)
    assert torch.equal(got != 0, text.action_mask)
    for name, gradient in plain.items():
        torch.testing.assert_close(probed[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max() + 1e-3))


def test_packed_rows_with_images_are_refused(models: Path) -> None:
    batch = image_batch("llava")
    with pytest.raises(AssertionError, match="lose the places"):
        build_inputs(batch, batch.action_mask, packed=True)
