"""Metrics per data source and environment: exact values, and parts that add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.samples import Group, SampleInfo
from openrlhf.launcher.trainer.evaluation import evaluation_metrics
from openrlhf.launcher.trainer.shaping import sample_metrics
from openrlhf.launcher.trainer.sources import by_source, failures_by_source
from support.trainer_fakes import FAILED, GOOD, FakeLearner, fake_run


def group(source: str, *episodes: list[float | None], environment: str = "", length: int = 4) -> Group:
    """Episodes, each given by the rewards of its branches; None: a failed branch."""
    samples = [
        replace(FAILED, episode=n) if reward is None else replace(GOOD, reward=reward, score=reward, episode=n)
        for n, rewards in enumerate(episodes)
        for reward in rewards
    ]
    samples = [s if s.failed else replace(s, num_trainable=length) for s in samples]
    item = PromptItem(group_id="g", prompt="p", datasource=source, environment=environment)
    return Group(prompt=item, samples=samples, handle=None)


def whole(groups: list[Group]) -> dict[str, float]:
    raw = [s.reward for g in groups for s in g.samples if not s.failed and s.reward is not None]
    return sample_metrics(groups, raw, raw)


def test_the_unit_is_the_episode_however_many_branches_it_has() -> None:
    groups = [
        group("maths", [1.0], [1.0, 0.5], [0.0] * 6, length=10),
        group("code", [1.0, 1.0, 1.0], [None], length=20),
    ]
    metrics = whole(groups)
    assert {k: v for k, v in metrics.items() if k.startswith("source/")} == {
        "source/maths/num_episodes": 3,
        "source/maths/share": 3 / 5,
        "source/maths/reward": (1.0 + 0.75 + 0.0) / 3,
        "source/maths/pass_rate": 1 / 3,
        "source/maths/response_length": 10,
        "source/maths/failed_samples": 0,
        "source/code/num_episodes": 2,
        "source/code/share": 2 / 5,
        "source/code/reward": 1.0,
        "source/code/pass_rate": 1.0,
        "source/code/response_length": 20,
        "source/code/failed_samples": 0,
    }
    assert (metrics["train/reward"], metrics["train/pass_rate"]) == ((1.0 + 0.75 + 0.0 + 1.0) / 4, 2 / 4)


EPISODES = st.lists(
    st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1, max_size=5
)
GROUPS = st.lists(st.tuples(st.sampled_from(["a", "b", "default"]), EPISODES), min_size=1, max_size=6)


@given(GROUPS)
def test_parts_add_up_to_the_whole(drawn: list[tuple[str, list[list[float | None]]]]) -> None:
    groups = [group(source, *episodes) for source, episodes in drawn]
    names = {source for source, _ in drawn}
    metrics, total = by_source(groups), whole(groups)
    if names == {"default"}:
        assert metrics == {}
        return

    def alive(name: str) -> int:
        return sum(any(r is not None for r in e) for source, episodes in drawn if source == name for e in episodes)

    assert sum(metrics[f"source/{name}/share"] for name in names) == pytest.approx(1.0)
    every = sum(len(episodes) for _, episodes in drawn)
    assert sum(metrics[f"source/{name}/num_episodes"] for name in names) == every
    count = sum(alive(name) for name in names)
    if count:
        for part in ("reward", "pass_rate"):
            weighed = sum(metrics[f"source/{name}/{part}"] * alive(name) for name in names if alive(name))
            assert weighed / count == pytest.approx(total[f"train/{part}"])


def test_environments_are_told_apart_where_they_are_no_sources() -> None:
    groups = [
        group("a", [1.0], environment="x"),
        group("b", [0.0], environment="x"),
        group("y", [1.0], environment="y"),
    ]
    metrics = by_source(groups)
    assert metrics["environment/x/reward"] == 0.5
    assert not [name for name in metrics if name.startswith("environment/y")]
    assert by_source([group("default", [1.0], environment="x")])["environment/x/share"] == 1.0


def test_failed_episodes_of_each_source() -> None:
    items = [group("a", [1.0], environment="x").prompt, group("b", [1.0]).prompt]
    assert failures_by_source([(items[0], 2), (items[1], 1), (items[0], 3)]) == {
        "source/a/failed_samples": 5,
        "environment/x/failed_samples": 5,
        "source/b/failed_samples": 1,
    }


@pytest.mark.parametrize("flags", [{}, {"train.async_enable": True}], ids=["sync", "async"])
def test_failures_of_sources_add_up_in_every_step(flags: dict[str, Any]) -> None:
    """Whole groups fail, single episodes fail, and a filter throws groups away."""

    def score(item: PromptItem, sample: int) -> SampleInfo:
        if item.position % 5 == 0 or (item.position % 3 == 0 and sample == 0):
            return FAILED
        reward = float(item.position % 2 if sample else 1)
        return replace(GOOD, reward=reward, score=reward)

    options = {
        "rollout.max_failed_fraction": 1.0,
        "rollout.n_samples_per_prompt": 4,
        "rollout.batch_size": 4,
        "train.batch_size": 16,
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": (0.0, 0.9),
    }
    run = fake_run(60, score=score, **options, **flags)
    draw = run.prompts.next
    run.prompts.next = lambda n: [replace(i, datasource=f"s{i.position % 3}") for i in draw(n)]
    run.run()
    steps = run.sink.steps
    for step in steps:
        parts = [v for k, v in step.items() if k.startswith("source/") and k.endswith("/failed_samples")]
        assert sum(parts) == step["rollout/failed_samples"]
    assert sum(step["rollout/failed_samples"] for step in steps) > 20


def test_failures_of_a_reward_model_belong_to_their_source() -> None:
    learner = FakeLearner(rewards=lambda sample: float("nan") if sample.handle == "h1" else 1.0)
    flags = {"reward.remote_url": None, "reward.model_name_or_path": "rm", "train.colocate_all": True}
    run = fake_run(
        4,
        score=lambda item, sample: replace(GOOD, reward=None, score=None),
        learner=learner,
        rollout__max_failed_fraction=1.0,
        **flags,
    )
    draw = run.prompts.next
    run.prompts.next = lambda n: [replace(i, datasource=f"s{i.position % 2}") for i in draw(n)]
    run.run()
    first = run.sink.steps[0]
    assert (first["source/s1/failed_samples"], first["source/s0/failed_samples"]) == (2, 0)
    assert first["rollout/failed_samples"] == 2


def test_an_evaluation_counts_samples_and_failures_of_each_set() -> None:
    metrics = evaluation_metrics([group("a", [1.0], [None]), group("b", [0.0, 1.0])], 2)
    assert [metrics[f"eval/eval_{n}_{what}"] for n in "ab" for what in ("num_samples", "failed_samples")] == [
        2,
        1,
        1,
        0,
    ]
    assert (metrics["eval/eval_num_samples"], metrics["eval/eval_failed_samples"]) == (3, 1)
