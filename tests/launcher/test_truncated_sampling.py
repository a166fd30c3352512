"""A policy that samples with top-p, and its reference: the same sets for both, and what that does to KL and metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.core.config import AdvantageConfig, AlgoConfig, KLConfig, Truncation
from openrlhf.launcher.ranks.batches import RankBatch, combine_sums
from openrlhf.launcher.ranks.roles import PolicyRank, ReferenceRank
from openrlhf.launcher.ray.start import truncation
from openrlhf.learner.learner import Learner
from openrlhf.learner.spec import Role
from openrlhf.rollout.config import RolloutConfig
from support.learner_models import save_tiny_model
from support.learner_step_cases import make_spec
from support.toy_ranks import references, sampled, toy_config

KL = AlgoConfig(advantage=AdvantageConfig(estimator="rloo"), kl=KLConfig(init_coef=0.1))
ROWS = [sampled([5, *range(10 + i, 22 + i)], logprob=-3.0) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sampling")
    save_tiny_model(path / "qwen3")
    save_tiny_model(path / "other", seed=1)
    return path


def rank(kind: Any, folder: Path, cut: Truncation, **changes: Any) -> Any:
    role = Role.REFERENCE if kind is ReferenceRank else Role.POLICY
    spec = make_spec(folder, micro=2, role=role, truncation=cut, **changes)
    spec = replace(spec, ds=replace(spec.ds, backend="support.plain_backend:build_plain"))
    if role is Role.REFERENCE:
        spec = replace(spec, optim=None)
    return kind(Learner(spec), toy_config(KL), resolve=lambda what, handles: list(handles))


def prepared(policy: PolicyRank, reference: ReferenceRank) -> tuple[RankBatch, dict[str, float]]:
    """As the controller does it with truncated sampling."""
    shares = [references(ROWS, [1.0] * 4)]
    own = policy.sampled(shares)
    scores = {"ref_logprobs": [reference.logprobs(shares, [policy.kept(own)])]}
    batch = policy.prepare(own, scores=scores, kl_coef=0.1)
    return batch, combine_sums([policy.metrics(batch)])


@pytest.mark.parametrize("cut", [Truncation(top_p=0.9), Truncation(top_k=20), Truncation(min_p=0.3)], ids=str)
def test_no_kl_between_equal_models(folder: Path, cut: Truncation) -> None:
    batch, metrics = prepared(rank(PolicyRank, folder, cut), rank(ReferenceRank, folder, cut))
    assert abs(metrics["train/kl"]) < 1e-6
    assert 0 < metrics["train/outside_kept"] < 1  # the tokens of this test were not sampled
    full = rank(ReferenceRank, folder, Truncation()).logprobs([references(ROWS, [1.0] * 4)])
    for row, index in enumerate(batch.batch.index.tolist()):
        assert batch.batch.old_logprobs is not None
        mine = batch.batch.old_logprobs[row][batch.batch.action_mask[row]]
        assert bool((mine >= full[index] - 1e-6).all())
        assert float((mine - full[index]).max()) > 0.01


def test_the_kl_is_one_of_distributions_over_the_policys_tokens(folder: Path) -> None:
    """Against the full logits of both models."""
    cut = Truncation(top_k=20)
    policy, reference = rank(PolicyRank, folder, cut), rank(ReferenceRank, folder, cut, model="other")
    batch, metrics = prepared(policy, reference)
    total = 0.0
    for row in range(4):
        ids = batch.batch.tokens[row : row + 1]
        with torch.no_grad():
            a, b = (r.learner.module.model(input_ids=ids).logits[0, :-1].float() for r in (policy, reference))
        targets = ids[0, 1:, None]
        mask = (a >= a.topk(20).values[:, -1:]).scatter(1, targets, True)
        ours, theirs = (z.masked_fill(~mask, float("-inf")).log_softmax(-1).gather(1, targets) for z in (a, b))
        total += float((ours - theirs).sum())
    assert metrics["train/kl"] == pytest.approx(total / 48, abs=1e-5)
    steps = combine_sums([policy.update(batch, [0], kl_coef=0.1)])
    assert steps["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert "train/outside_kept" not in steps  # measured where the sets were found


def test_one_step_finds_its_own_sets(folder: Path) -> None:
    policy = rank(PolicyRank, folder, Truncation(top_p=0.9))
    batch = policy.prepare([references(ROWS, [1.0, 0.0] * 2)], scores={}, kl_coef=0.0)
    assert batch.batch.old_logprobs is None
    assert 0 < combine_sums([policy.update(batch, [0], kl_coef=0.0)])["train/outside_kept"] < 1


def test_the_flags_of_sampling_are_those_of_the_log_probs() -> None:
    assert truncation(RolloutConfig(top_p=0.9, top_k=5, min_p=0.1)) == Truncation(top_p=0.9, top_k=5, min_p=0.1)
    assert not truncation(RolloutConfig()).active
