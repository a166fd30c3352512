"""Muon: the raw gradient is clipped, the update is torch's, and the right parameters get it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.learner.config import DsConfig, MuonConfig, OptimConfig
from openrlhf.learner.constraints import optim_conflicts
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero.optim import clip_factor
from support.learner_ranks import RankResults, result
from support.learner_state_cases import EMBEDDING, MATRIX

STAGES = [0, 1, 2, 3]
RANK_CASES = {2: ["muon"]}

on_ranks = [pytest.mark.ranks, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]


def with_ranks(test: Any) -> Any:
    for mark in on_ranks:
        test = mark(test)
    return test


def outcome(ranks: RankResults, stage: int, max_norm: float) -> dict[str, Any]:
    return result(ranks, "muon", 2)[0][stage, max_norm]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


@with_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_update_does_not_depend_on_a_max_norm_above_the_raw_norm(ranks: RankResults, stage: int) -> None:
    # B122: neither direction nor size
    free, bounded = outcome(ranks, stage, 0.0), outcome(ranks, stage, 100.0)
    assert max(bounded["norms"]) < 100.0
    assert free["norms"] == bounded["norms"]
    for one, other in zip(free["changes"], bounded["changes"], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@with_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_norm_is_that_of_the_raw_gradient_on_every_stage(ranks: RankResults, stage: int) -> None:
    first = outcome(ranks, stage, 0.05)
    # the second step starts from weights that differ by the rounding of the first
    assert first["norms"][0] == pytest.approx(outcome(ranks, 0, 0.05)["norms"][0], rel=1e-5)
    assert first["norms"] == pytest.approx(outcome(ranks, 0, 0.05)["norms"], rel=1e-3)
    assert first["norms"][0] > 0.05  # it was clipped


@with_ranks
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_move_alike_on_every_stage(ranks: RankResults, stage: int, max_norm: float) -> None:
    changes = zip(outcome(ranks, 0, max_norm)["changes"], outcome(ranks, stage, max_norm)["changes"], strict=True)
    for want, got in changes:
        for name in want.keys() & got.keys():
            assert cosine(got[name], want[name]) > 0.999, name
            assert float(got[name].norm() / want[name].norm()) == pytest.approx(1.0, abs=0.01), name


@with_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_newton_schulz_ran_for_hidden_matrices_only(ranks: RankResults, stage: int) -> None:
    # B122: 7 matrices in each of 2 layers and no embedding; nobody's update is Adam's in disguise
    calls = outcome(ranks, stage, 0.0)["calls"]
    assert len(calls) > 0
    assert (128, 64) not in calls


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five steps of Muon's iteration (Jordan et al., 2024) in float64: what both backends round."""
    x = matrix.double().T if matrix.shape[0] > matrix.shape[1] else matrix.double()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@with_ranks
@pytest.mark.parametrize("max_norm", [0.0, 100.0, 0.05])
@pytest.mark.parametrize("stage", STAGES)
def test_two_steps_follow_muon(ranks: RankResults, stage: int, max_norm: float) -> None:
    """Fed with the same gradients, clipped first: momentum 0.95 with Nesterov, then the exact iteration."""
    seen = outcome(ranks, stage, max_norm)
    momentum = torch.zeros_like(seen["gradients"][0][MATRIX])
    for gradients, change, norm in zip(seen["gradients"], seen["changes"], seen["norms"], strict=True):
        gradient = gradients[MATRIX] * clip_factor(norm, max_norm)
        momentum.lerp_(gradient, 0.05)
        want = -0.02 * max(1.0, 192 / 64) ** 0.5 * newton_schulz(gradient.lerp(momentum, 0.95)).float()
        assert cosine(change[MATRIX], want) > 0.999
        assert float(change[MATRIX].norm() / want.norm()) == pytest.approx(1.0, abs=0.01)


# DeepSpeed 0.19.8 compiles helpers with torch.jit when it is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_iteration_is_that_of_torchs_muon() -> None:
    """On a matrix of full rank torch's own, in bf16, agrees with the exact one and with the backend's."""
    from deepspeed.runtime.zero.muon.original_muon import zeropower_via_gram_newtonschulz

    gradient = torch.randn(192, 64, generator=torch.Generator().manual_seed(0))
    matrix = torch.nn.Parameter(torch.zeros_like(gradient))
    matrix.grad = gradient
    torch.optim.Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    assert cosine(-matrix.detach().double(), newton_schulz(gradient)) > 0.999
    assert cosine(zeropower_via_gram_newtonschulz(gradient, 5).double(), -matrix.detach().double()) > 0.999


@with_ranks
def test_hidden_matrices_move_orthogonally_and_embeddings_do_not(ranks: RankResults) -> None:
    # B122: singular values of a Muon update are about equal; Adam's first step is lr for every element
    change = outcome(ranks, 2, 0.0)["changes"][0]
    values = torch.linalg.svdvals(change[MATRIX] / 0.02 / (192 / 64) ** 0.5)
    assert 0.7 < float(values.median()) < 1.2
    assert float(values.max()) < 1.3
    moved = change[EMBEDDING][change[EMBEDDING] != 0].abs()
    assert float(moved.median()) == pytest.approx(1e-3, rel=0.01)


def test_clip_factor() -> None:
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5, abs=1e-6)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(5.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("config", "offload", "message"),
    [
        (
            OptimConfig(optim="muon", muon=MuonConfig(ns_steps=3)),
            False,
            r"`optim\.muon\.ns_steps` 3: .* always does 5",
        ),
        (
            OptimConfig(optim="muon", muon=MuonConfig(nesterov=False)),
            False,
            r"`optim\.muon\.nesterov` False: .* always",
        ),
        (OptimConfig(optim="muon"), True, r"`ds\.adam_offload`"),
    ],
)
def test_options_the_backend_would_ignore_are_errors(config: OptimConfig, offload: bool, message: str) -> None:
    ds = DsConfig(param_dtype="bf16", attn_implementation="sdpa", adam_offload=offload)
    with pytest.raises(ValueError, match=message):
        LearnerSpec(role=Role.POLICY, model_path="m", ds=ds, optim=config)


def test_adam_ignores_muon_options() -> None:
    assert list(optim_conflicts(OptimConfig(muon=MuonConfig(ns_steps=3)), DsConfig(adam_offload=True))) == []
