"""A reference that follows the policy: resets, soft updates, and what a checkpoint holds of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import Role
from support.learner_models import make_batch, save_tiny_model
from support.learner_ranks import RankResults, result
from support.learner_step_cases import make_spec, parameters

RANK_CASES = {2: ["following"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("following")
    save_tiny_model(path / "qwen3")
    save_tiny_model(path / "moved", seed=1)
    save_tiny_model(path / "gpt2", "gpt2")
    return path


def frozen(folder: Path, model: str = "qwen3", dtype: Any = "fp32", **changes: Any) -> Learner:
    spec = make_spec(folder, role=Role.REFERENCE, model=model, optim=None, **changes)
    return Learner(replace(spec, ds=replace(spec.ds, backend="support.plain_backend:build_plain", param_dtype=dtype)))


def follow(reference: Learner, policy: Learner, times: int = 1) -> None:
    assert reference.following is not None
    for _ in range(times):
        for bucket in policy.model_buckets(30_000, wanted=True)[1]:
            reference.following.take(bucket)


def test_a_reset_leaves_no_kl(folder: Path) -> None:
    policy, reference = frozen(folder, "moved"), frozen(folder, follow_alpha=1.0)
    batch = make_batch()
    before, want = reference.score(batch).logprobs, policy.score(batch).logprobs
    follow(reference, policy)
    after = reference.score(batch).logprobs
    assert before is not None
    assert want is not None
    assert after is not None
    assert torch.equal(after, want)
    assert float((before - want).abs().max()) > 0.1


@pytest.mark.parametrize("alpha", [0.5, 0.1])
@pytest.mark.parametrize("times", [1, 7])
def test_closed_form_of_soft_updates(folder: Path, alpha: float, times: int) -> None:
    """After k updates by a policy that stays: policy + (1 - alpha)^k (reference - policy)."""
    policy, reference = frozen(folder, "moved"), frozen(folder, follow_alpha=alpha)
    first, target = parameters(reference), parameters(policy)
    follow(reference, policy, times)
    now = parameters(reference)
    for name, start in first.items():
        want = target[name].double() + (1 - alpha) ** times * (start.double() - target[name].double())
        assert float((now[name] - want).abs().max()) <= 1e-6


def test_small_steps_add_up_in_16_bit(folder: Path) -> None:
    """By 0.002 of a difference at a time nothing would ever move in bf16."""
    policy, reference = frozen(folder, "moved", "bf16"), frozen(folder, "qwen3", "bf16", follow_alpha=0.002)
    first, target = parameters(reference), parameters(policy)
    follow(reference, policy, 200)
    now = parameters(reference)
    share = (1 - 0.002) ** 200
    for name, start in first.items():
        want = target[name].float() + share * (start.float() - target[name].float())
        assert torch.allclose(now[name].float(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_goes_on_after_a_resume_bit_for_bit(folder: Path, tmp_path: Path, alpha: float, dtype: str) -> None:
    policy, whole = frozen(folder, "moved", dtype), frozen(folder, "qwen3", dtype, follow_alpha=alpha)
    follow(whole, policy, 2)
    assert whole.following is not None
    whole.following.save(tmp_path / "ref")
    resumed = frozen(folder, "qwen3", dtype, follow_alpha=alpha)
    assert resumed.following is not None
    resumed.following.load(tmp_path / "ref")
    for learner in (whole, resumed):
        follow(learner, frozen(folder, "qwen3", dtype))
    a, b = parameters(whole), parameters(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)
    other = frozen(folder, "gpt2", dtype, follow_alpha=alpha)
    assert other.following is not None
    with pytest.raises(ValueError, match=r"other parameters than `model_path` has now"):
        other.following.load(tmp_path / "ref")


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_alpha_is_a_share(folder: Path, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"`follow_alpha` must be in \(0, 1\]"):
        frozen(folder, follow_alpha=alpha)


@pytest.mark.ranks
@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(600)
def test_stages_of_policy_and_reference_may_differ(ranks: RankResults) -> None:
    for outcome in result(ranks, "following", 2):
        assert len(outcome) == 6
        for case, found in outcome.items():
            assert found["moved"] > 1e-3, case
            assert found["weights"] <= 1e-6, case
            assert found["resumed"], case
            if case.endswith("1.0"):
                assert found["kl"] <= 1e-6, case
            else:
                assert found["kl"] > 1e-4, case
