"""`Learner` over another backend: plain PyTorch through the same seam, and nothing of DeepSpeed is imported."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from openrlhf.core.config import PolicyLossConfig
from openrlhf.learner.learner import Learner, NonFiniteStepError
from openrlhf.learner.objective import PolicyObjective, ValueObjective
from openrlhf.learner.spec import LearnerSpec, Role
from support.learner_models import make_batch, plain_logprobs, save_tiny_model
from support.learner_step_cases import make_spec, parameters

OBJECTIVE = PolicyObjective(config=PolicyLossConfig(), detach_old=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_tiny_model(path / "qwen3")
    return path


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # importing it is an error


def spec(folder: Path, **changes: Any) -> LearnerSpec:
    made = make_spec(folder, micro=3, **changes)
    ds = replace(made.ds, backend="support.plain_backend:build_plain")
    return replace(made, ds=ds, batch=replace(made.batch, enable_ema=True, ema_beta=0.5, max_skipped_steps=2))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ["none_such:build", "openrlhf.learner.engine:build", "json", ""])
def test_a_backend_that_is_not_there_is_named(folder: Path, name: str) -> None:
    made = make_spec(folder)
    with pytest.raises(ValueError, match=f"`ds.backend` {name!r}: no such module:function"):
        Learner(replace(made, ds=replace(made.ds, backend=name)))


def test_scores_are_those_of_the_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", attn_implementation="eager")
    batch = make_batch()
    frozen = Learner(replace(spec(folder, role=Role.REFERENCE), optim=None))
    with torch.no_grad():
        want, entropy = plain_logprobs(model, batch)
    for learner in (frozen, Learner(spec(folder))):
        scores = learner.score(batch, with_entropy=True)
        assert float((scores.logprobs - want).abs().max()) < 1e-5  # pyright: ignore[reportOptionalOperand]
        assert float((scores.entropy - entropy).abs().max()) < 1e-5  # pyright: ignore[reportOptionalOperand]


def test_a_step_is_one_exact_mean_clipped_once(folder: Path) -> None:
    """Gradient of the whole batch in one piece and torch's AdamW, against micro-batches of three."""
    from transformers import AutoModelForCausalLM

    learner, batch = Learner(spec(folder)), make_batch()
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32, attn_implementation="eager")
    logprobs, _ = plain_logprobs(model, batch)
    assert batch.advantages is not None
    tokens = float(batch.action_mask.sum())
    loss = -((logprobs - logprobs.detach()).exp() * batch.advantages * batch.action_mask).sum() / tokens
    loss.backward()
    optim = learner.spec.optim
    assert optim is not None
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_norm))
    adam = optim.adam
    torch.optim.AdamW(model.parameters(), lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=0.0).step()
    metrics = learner.update(batch, OBJECTIVE)
    assert metrics["policy_loss"][0] / tokens == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["grad_norm"] == (pytest.approx(norm, rel=1e-5), 1.0)
    assert metrics["lr"] == (1e-3, 1.0)
    assert learner.optimizer_steps == 1
    got, want = parameters(learner), {name: p.detach() for name, p in model.named_parameters()}
    assert got.keys() == want.keys()
    assert max(float((got[name] - want[name]).abs().max()) for name in want) < 5e-5  # Adam: lr 1e-3 per element


def test_a_step_that_is_not_finite_is_skipped(folder: Path) -> None:
    learner, batch = Learner(spec(folder)), make_batch()
    assert batch.advantages is not None
    advantages = batch.advantages.clone()
    advantages[6, batch.action_mask[6].nonzero()[0]] = float("inf")
    bad, before = batch.with_(advantages=advantages), parameters(learner)
    assert learner.update(bad, OBJECTIVE)["skipped_steps"] == (1.0, 1.0)
    assert equal(parameters(learner), before)
    with pytest.raises(NonFiniteStepError, match="number 6"):
        learner.update(bad, OBJECTIVE)
    assert learner.optimizer_steps == 0


def test_a_critic_learns_its_returns(folder: Path) -> None:
    learner = Learner(spec(folder, role=Role.CRITIC))
    batch = make_batch()
    batch = batch.with_(returns=torch.ones_like(batch.tokens, dtype=torch.float32))
    losses = []
    for _ in range(4):
        total, count = learner.update(batch.with_(values=learner.score(batch).values), ValueObjective())["critic_loss"]
        losses.append(total / count)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


def test_export_and_stream_hold_the_trained_weights(folder: Path, tmp_path: Path) -> None:
    learner = Learner(spec(folder))
    before = parameters(learner)
    learner.update(make_batch(), OBJECTIVE)
    after = parameters(learner)
    assert not equal(before, after)
    assert [(i.name, i.shape, i.dtype) for i in learner.weight_metadata()] == [
        (name, tuple(t.shape), t.dtype) for name, t in after.items()
    ]
    assert [bucket for bucket in learner.named_parameter_buckets(20_000, wanted=False) if bucket] == []
    learner.export_hf(str(tmp_path / "out"))
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), after)
    averages = load_file(tmp_path / "out" / "ema" / "model.safetensors")
    assert all(torch.allclose(averages[name], (before[name] + after[name]) / 2, atol=1e-6) for name in after)


def test_resumed_equals_uninterrupted_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    straight, resumed = Learner(spec(folder)), Learner(spec(folder))
    straight.update(make_batch(seed=0), OBJECTIVE)
    straight.save_checkpoint(str(tmp_path))
    resumed.update(make_batch(seed=5), OBJECTIVE)
    resumed.load_checkpoint(str(tmp_path))
    assert straight.update(make_batch(seed=1), OBJECTIVE) == resumed.update(make_batch(seed=1), OBJECTIVE)
    assert equal(parameters(straight), parameters(resumed))
    assert straight.ema is not None
    assert resumed.ema is not None
    assert equal(straight.ema.full_state() or {}, resumed.ema.full_state() or {})
    assert resumed.optimizer_steps == 2


def test_sleep_reaches_the_backend_only_where_it_is_wanted(folder: Path) -> None:
    engine: Any
    for enabled in (False, True):
        made = spec(folder)
        learner = Learner(replace(made, ds=replace(made.ds, enable_sleep=enabled)))
        engine = learner._engine
        learner.sleep()
        assert engine.asleep is enabled
        learner.wake()
        assert engine.asleep is False
