"""SFT, reward model, RL with it in the cluster and behind a server, DPO: each stage does what it is for."""

from __future__ import annotations

from pathlib import Path

import pipeline
import pytest
import stages

pytestmark = [pytest.mark.proof, pytest.mark.stack, pytest.mark.timeout(3600)]


def test_every_stage_is_better_than_the_one_before(tmp_path: Path) -> None:
    found = pipeline.pipeline(stages.Places(tmp_path), stages.Sizes(), seed=1, with_rl=True)
    print("\n".join(f"{m.stage}: {m.text}" for m in found))
    assert [m.stage for m in found] == ["sft", "reward_model", "rl_in_cluster", "rl_remote", "dpo"]
    assert [m for m in found if not m.ok] == []
