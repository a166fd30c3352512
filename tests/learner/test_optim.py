"""Which parameters get which rates: the groups of AdamW and Muon. In this process, without DeepSpeed."""

from __future__ import annotations

import pytest
import torch

from openrlhf.learner.config import AdamConfig, DsConfig, MuonConfig, OptimConfig
from openrlhf.learner.models import load_module
from openrlhf.learner.modules import LearnerModule
from openrlhf.learner.spec import LearnerSpec, Role
from openrlhf.learner.zero.optim import build_optimizer
from support.learner_models import save_tiny_model

ADAM = AdamConfig(lr=3e-4, betas=(0.8, 0.7), eps=1e-5, weight_decay=0.25)
VECTORS = 2 * 4 + 1
"""Norms of the tiny model: four in each of two layers, and the last."""
MATRICES = 2 * 7


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> LearnerModule:
    path = save_tiny_model(tmp_path_factory.mktemp("optim") / "qwen3")
    ds = DsConfig(param_dtype="fp32", attn_implementation="sdpa")
    spec = LearnerSpec(role=Role.POLICY, model_path=str(path), ds=ds, optim=OptimConfig())
    return load_module(spec, torch.device("cpu"))


def test_adam_takes_its_options_and_spares_norms_from_decay(module: LearnerModule) -> None:
    decayed, spared = build_optimizer(module, OptimConfig(adam=ADAM)).param_groups
    for group in (decayed, spared):
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.7), 1e-5)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.25, 0.0)
    assert len(spared["params"]) == VECTORS
    assert len(decayed["params"]) == MATRICES + 1  # the embedding, which is the head too


def test_one_group_without_decay(module: LearnerModule) -> None:
    (group,) = build_optimizer(module, OptimConfig()).param_groups
    assert (group["weight_decay"], len(group["params"])) == (0.0, VECTORS + MATRICES + 1)


# DeepSpeed 0.19.8 compiles helpers with torch.jit when it is imported
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_muon_takes_its_options_for_hidden_matrices_and_adams_for_the_rest(module: LearnerModule) -> None:
    config = OptimConfig(optim="muon", muon=MuonConfig(lr=0.05, momentum=0.6), adam=ADAM)
    matrices, rest = build_optimizer(module, config).param_groups
    assert (matrices["lr"], matrices["momentum"], len(matrices["params"])) == (0.05, 0.6, MATRICES)
    assert (rest["lr"], rest["betas"], rest["eps"], len(rest["params"])) == (3e-4, (0.8, 0.7), 1e-5, VECTORS + 1)
    assert matrices["weight_decay"] == rest["weight_decay"] == 0.25
