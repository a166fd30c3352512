"""Real ranks, spawned once for all test modules: each names the cases that it needs in `RANK_CASES`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.learner_models import VOCAB, save_tiny_model
from support.learner_ranks import RankResults, needed_cases, run_cases
from support.learner_sequence_cases import save_sequence_models
from support.learner_sharing_cases import save_sharing_models
from support.learner_step_cases import WIDE
from support.learner_vision_cases import FAMILIES as VISION_FAMILIES
from support.vision_models import vision_model


@pytest.fixture(scope="session")
def rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks work; holds tiny models: `qwen3` (tied), `untied`, `gpt2`, `WIDE`, a hybrid, and others."""
    path = tmp_path_factory.mktemp("learner")
    save_tiny_model(path / "qwen3")
    save_tiny_model(path / "untied", tie=False)
    save_tiny_model(path / "gpt2", "gpt2")
    save_tiny_model(path / "teacher", "llama", tie=False, seed=5, vocab=VOCAB + 8, hidden=96)
    for name in WIDE:
        save_tiny_model(path / name, tie=name == "wide", vocab=2048)
    for family in VISION_FAMILIES:
        vision_model(family).save_pretrained(path / family)
    save_tiny_model(path / "qwen3_next", "qwen3_next")
    save_sharing_models(path)
    save_sequence_models(path)
    return path


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, rank_folder: Path) -> RankResults:
    """Results of all cases that the collected tests need, {(case, world size): [result of rank 0, ...]}."""
    return run_cases(needed_cases(request.session, "RANK_CASES"), rank_folder)
