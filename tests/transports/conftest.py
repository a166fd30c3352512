"""Trainer ranks with engine workers beside them, spawned once: each test module names the cases it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.learner_models import save_tiny_model
from support.learner_ranks import TIMEOUT, RankResults, needed_cases, run_cases

CASE_S = 30.0
"""Bound of one case where many run one after the other on a busy machine."""


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Results of all cases that the collected tests need, {(case, world size): [result of rank 0, ...]}."""
    folder: Path = tmp_path_factory.mktemp("transports")
    save_tiny_model(folder / "qwen3")
    save_tiny_model(folder / "untied", tie=False)
    needed = needed_cases(request.session, "RANK_CASES")
    bound = max(TIMEOUT, CASE_S * sum(len(names) for names in needed.values()))
    modules = tuple(f"support.transport_{kind}cases" for kind in ("", "adapter_", "stream_"))
    return run_cases(needed, folder, modules, bound)
