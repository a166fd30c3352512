"""Every estimator with every source of samples and rewards in every pipeline: two steps on fakes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from openrlhf.agents.types import PromptItem
from openrlhf.core.tables import ESTIMATORS
from openrlhf.launcher.samples import SampleInfo
from support.trainer_fakes import GOOD, FakeLearner, fake_run

PIPELINES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"train.async_enable": True},
    "partial": {"train.async_enable": True, "train.partial_rollout_enable": True},
}
SOURCES: dict[str, dict[str, Any]] = {
    "single-turn": {"reward.remote_url": "reward.py"},
    "multi-turn": {"reward.remote_url": None, "train.agent_func_path": "agent.py"},
    "reward model": {"reward.remote_url": None, "reward.model_name_or_path": "rm"},
    "HTTP reward": {"reward.remote_url": "http://host:5000"},
}


def sampled(source: str) -> Any:
    """What each source leaves in a sample: several turns, no reward yet, no score."""

    def score(item: PromptItem, sample: int) -> SampleInfo:
        reward = float((item.position + sample) % 2)
        return {
            "single-turn": replace(GOOD, reward=reward, score=reward),
            "multi-turn": replace(GOOD, reward=reward, score=reward, longest_turn=2, stop_reason="done"),
            "reward model": replace(GOOD, reward=None, score=None),
            "HTTP reward": replace(GOOD, reward=reward, score=None),
        }[source]

    return score


@pytest.mark.parametrize(("estimator", "source", "pipeline"), list(product(tuple(ESTIMATORS), SOURCES, PIPELINES)))
def test_two_steps(estimator: str, source: str, pipeline: str) -> None:
    run = fake_run(
        4,
        score=sampled(source),
        delay=lambda item: 3 + item.position,
        learner=FakeLearner(delay=lambda: 5, rewards=lambda sample: float(sample.position)),
        **{"algo.advantage.estimator": estimator},
        **SOURCES[source],
        **PIPELINES[pipeline],
    )
    summary = run.run()
    assert (summary.steps, summary.optimizer_steps) == (2, 2)
    assert run.trained() == sorted(f"h{p}" for p in range(4) for _ in range(2))
    assert run.learner.pushed == [0, 1, 2]
    assert all(step["train/reward"] == 0.5 for step in run.sink.steps)
    assert run.sink.steps[0]["rollout/staleness_max"] == 0
    assert pipeline == "partial" or run.learner.pushed_while_busy == 0
