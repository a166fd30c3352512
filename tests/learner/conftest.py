"""Real ranks, spawned once for all test modules: each names the cases that it needs in `RANK_CASES`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.learner_models import save_tiny_model
from support.learner_ranks import RankResults, join_ranks, start_ranks


@pytest.fixture(scope="session")
def rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks work; holds the tiny models `qwen3` (tied), `untied` and `gpt2`."""
    path = tmp_path_factory.mktemp("learner")
    save_tiny_model(path / "qwen3")
    save_tiny_model(path / "untied", tie=False)
    save_tiny_model(path / "gpt2", "gpt2")
    return path


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, rank_folder: Path) -> RankResults:
    """Results of all cases that the collected tests need, {(case, world size): [result of rank 0, ...]}."""
    needed: dict[int, dict[str, None]] = {1: {}, 2: {}}
    for item in request.session.items:
        wanted: Mapping[int, list[str]] = getattr(item.getparent(pytest.Module).obj, "RANK_CASES", {})  # type: ignore[union-attr]
        for world, names in wanted.items():
            needed[world].update(dict.fromkeys(names))
    started: dict[int, Any] = {w: start_ranks(list(needed[w]), rank_folder, w) for w in (1, 2) if needed[w]}
    results: RankResults = {}
    for world, context in started.items():
        for name, outcome in join_ranks(context, list(needed[world]), rank_folder, world).items():
            results[name, world] = outcome
    return results
