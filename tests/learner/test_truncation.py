"""Log-probs over what truncation keeps: however a batch is laid out, and over the same sets while weights move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.core.batch import Batch
from openrlhf.core.config import NO_TRUNCATION, PolicyLossConfig, Truncation
from openrlhf.core.truncation import KeptTokens, kept_mask
from openrlhf.learner.heads import TokenDistribution
from openrlhf.learner.learner import Learner, Scores
from openrlhf.learner.objective import PolicyObjective
from openrlhf.learner.spec import Role
from support.learner_models import make_batch, save_tiny_model
from support.learner_step_cases import make_spec, parameters

CUT = Truncation(top_p=0.7, top_k=90, min_p=0.02)
TEMPERATURE = 0.8
OBJECTIVE = PolicyObjective(config=PolicyLossConfig(entropy_coef=0.01), detach_old=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cut")
    save_tiny_model(path / "qwen3")
    return path


def make(folder: Path, *, packed: bool = False, micro: int = 3, size: int = 3, **changes: Any) -> Learner:
    spec = make_spec(folder, micro=micro, **{"truncation": CUT, "temperature": TEMPERATURE} | changes)
    ds = replace(spec.ds, backend="support.plain_backend:build_plain", packing_samples=packed)
    return Learner(replace(spec, ds=ds, score_micro_batch_size=size))


def by_hand(folder: Path, batch: Batch) -> tuple[Tensor, list[KeptTokens]]:
    """Log-probs [B, T] over each position's kept set, which the sampled token is part of, by full logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32, attn_implementation="sdpa")
    out = torch.zeros(batch.tokens.shape)
    kept: list[KeptTokens] = []
    for row in range(batch.size):
        length = int(batch.lengths[row])
        with torch.no_grad():
            logits = model(input_ids=batch.tokens[row : row + 1, :length]).logits[0].float() / TEMPERATURE
        sets = []
        for t in batch.action_mask[row].nonzero()[:, 0].tolist():
            token = int(batch.tokens[row, t])
            mask = kept_mask(logits[t - 1 : t].clone(), CUT)[0]
            mask[token] = True
            out[row, t] = logits[t - 1, token] - logits[t - 1][mask].logsumexp(-1)
            sets.append(KeptTokens(mask.sum()[None], mask.nonzero()[:, 0].int()))
        kept.append(KeptTokens.joined(sets))
    return out, kept


def largest(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None
    assert b is not None
    return float((a - b).abs().max())


@pytest.mark.parametrize(("packed", "size"), [(False, 3), (False, 1), (True, 4), (True, 8)])
def test_scores_are_those_of_the_kept_sets(folder: Path, packed: bool, size: int) -> None:
    batch = make_batch()
    want, kept = by_hand(folder, batch)
    scores = make(folder, packed=packed, size=size).score(batch, with_entropy=True)
    assert largest(scores.logprobs, want) < 1e-5
    assert scores.kept is not None
    for got, sets in zip(scores.kept, kept, strict=True):
        assert torch.equal(got.counts, sets.counts)
        assert torch.equal(got.ids, sets.ids)
    assert scores.outside is not None
    assert 0 < float(scores.outside.sum()) < float(batch.action_mask.sum())  # the tokens are random
    assert float(scores.outside[~batch.action_mask].sum()) == 0
    full = make(folder, truncation=Truncation()).score(batch)
    assert full.kept is None
    assert full.outside is None
    assert bool((scores.logprobs >= full.logprobs - 1e-6).all())  # pyright: ignore[reportOptionalOperand]


def scored(learner: Learner, batch: Batch) -> tuple[Scores, Batch]:
    scores = learner.score(batch)
    return scores, batch.with_(old_logprobs=scores.logprobs, kept=scores.kept)


def test_the_sets_stay_while_the_weights_move(folder: Path) -> None:
    learner = make(folder)
    before, batch = scored(learner, make_batch())
    for _ in range(3):
        learner.update(batch, OBJECTIVE)
    kept, own = learner.score(batch), learner.score(make_batch())
    assert kept.kept is not None
    assert before.kept is not None
    assert own.kept is not None
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(kept.kept, before.kept, strict=True))
    assert any(len(a.ids) != len(b.ids) for a, b in zip(own.kept, before.kept, strict=True))
    assert kept.outside is not None
    assert float(kept.outside.sum()) == 0
    selected = learner.score(batch.select([5, 2, 0]))
    assert selected.logprobs is not None
    assert kept.logprobs is not None
    assert largest(selected.logprobs, kept.logprobs[[5, 2, 0]]) < 1e-6


@pytest.mark.parametrize("given", [False, True])
def test_a_step_does_not_depend_on_the_split(folder: Path, given: bool) -> None:
    results = []
    for packed, micro in ((False, 8), (False, 2), (True, 3)):
        learner = make(folder, packed=packed, micro=micro)
        batch = scored(learner, make_batch())[1] if given else make_batch()
        metrics = learner.update(batch, replace(OBJECTIVE, detach_old=not given))
        results.append((metrics, parameters(learner)))
    (metrics, weights), *others = results
    tokens = float(make_batch().action_mask.sum())
    assert ("outside_kept" in metrics) is not given
    for other, moved in others:
        for name in ("policy_loss", "entropy_loss", "grad_norm"):
            assert other[name][0] == pytest.approx(metrics[name][0], abs=1e-6 * tokens)
        assert max(float((moved[n] - weights[n]).abs().max()) for n in weights) < 1e-4  # Adam: signs of small gradients
        assert other.get("outside_kept") == metrics.get("outside_kept")


def test_the_reference_over_the_policys_sets(folder: Path) -> None:
    batch = make_batch()
    policy, reference = make(folder), make(folder, role=Role.REFERENCE, optim=None)
    mine, kept = scored(policy, batch)
    assert largest(reference.score(kept).logprobs, mine.logprobs) < 1e-6  # no KL between equal models
    policy.update(kept, OBJECTIVE)
    moved = scored(policy, batch)[1]
    theirs = reference.score(moved)
    assert theirs.kept is not None
    assert moved.kept is not None
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(theirs.kept, moved.kept, strict=True))


def test_a_check_over_the_whole_vocabulary_is_none_of_this(folder: Path) -> None:
    batch = make_batch()
    learner, plain = make(folder), make(folder, truncation=Truncation(), temperature=1.0)
    got = learner.score(scored(learner, batch)[1], distribution=TokenDistribution())
    assert got.kept is None
    assert largest(got.logprobs, plain.score(batch).logprobs) == 0


@pytest.mark.parametrize(("packed", "size"), [(False, 3), (True, 4)])
def test_tokens_at_a_temperature_of_their_own_are_scored_at_it(folder: Path, packed: bool, size: int) -> None:
    batch = make_batch()
    temperatures = torch.zeros(batch.tokens.shape)
    temperatures[0, : int(batch.lengths[0]) // 2] = 0.3
    temperatures[1] = 1.7
    learner = make(folder, packed=packed, size=size, truncation=NO_TRUNCATION)
    scores = learner.score(batch.with_(temperatures=temperatures), with_entropy=True)
    own = {t: make(folder, truncation=NO_TRUNCATION, temperature=t).score(batch, with_entropy=True) for t in (0.3, 1.7)}
    plain = learner.score(batch, with_entropy=True)
    for name in ("logprobs", "entropy"):
        want = getattr(plain, name).clone()
        for temperature, scored in own.items():
            want = torch.where(temperatures == temperature, getattr(scored, name), want)
        assert largest(getattr(scores, name), want) < 1e-5
        assert largest(getattr(scores, name), getattr(plain, name)) > 0.1
