"""Real learner ranks under the launcher's own code, spawned once for all test modules, which name their cases."""

from __future__ import annotations

import pytest

from support.learner_models import save_tiny_model
from support.learner_ranks import RankResults, needed_cases, run_cases
from support.tiny_models import tiny_qwen3

MODULES = ("support.launcher_resume_cases", "support.launcher_memory_cases", "support.launcher_replay_cases")
TIMEOUT = 3000.0
"""For the long sweeps; a test of the default run has a bound of its own."""


@pytest.fixture(scope="session")
def launcher_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Results of all cases that the collected tests name in `LAUNCHER_CASES`; the folder holds the models."""
    folder = tmp_path_factory.mktemp("launcher-ranks")
    save_tiny_model(folder / "qwen3")
    tiny_qwen3(folder / "quickstart")
    return run_cases(needed_cases(request.session, "LAUNCHER_CASES"), folder, MODULES, TIMEOUT)
