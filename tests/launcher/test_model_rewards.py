"""Rewards of an in-cluster model: while others generate, in any order the same, and never beside an engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from openrlhf.agents.types import PromptItem
from openrlhf.launcher.config import TrainPPOConfig
from openrlhf.launcher.flags import build
from openrlhf.launcher.samples import Group, SampleRef
from openrlhf.launcher.trainer.model_rewards import RewardStream, add_rewards, reward_stream
from openrlhf.rollout.failure_share import RolloutFailedError
from support.trainer_fakes import FAILED, GOOD, FakeLearner, fake_run, unscored

MODEL: dict[str, Any] = {"reward.remote_url": None, "reward.model_name_or_path": "rm"}
ASYNC: dict[str, Any] = {"train.async_enable": True}
BATCH_OF_40: dict[str, Any] = {"rollout.batch_size": 10, "rollout.n_samples_per_prompt": 4, "train.batch_size": 40}


class Model(FakeLearner):
    """Takes a few turns of the loop per call; the handles of every call."""

    def __init__(self) -> None:
        super().__init__(rewards=lambda sample: float(sample.position))
        self.calls: list[list[str]] = []

    async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
        self.calls.append([s.handle for s in samples])
        for _ in range(5):
            await asyncio.sleep(0)
        return await super().score_rewards(samples)


def group(number: int, n: int = 2) -> Group:
    item = PromptItem(group_id=f"p{number}", prompt="p", position=number)
    return Group(prompt=item, samples=[unscored(item, i) for i in range(n)], handle=f"h{number}")


def rewards(scored: Group) -> list[float | None]:
    return [s.reward for s in scored.samples]


def test_only_samples_without_a_reward_are_scored() -> None:
    model = Model()
    mixed = replace(group(0), samples=[group(0).samples[0], FAILED, replace(GOOD, reward=7.0)])
    (scored,) = asyncio.run(add_rewards(model, [mixed]))
    assert rewards(scored) == [0.0, None, 7.0]
    assert model.calls == [["h0"]]
    assert asyncio.run(add_rewards(model, [scored])) == [scored]
    assert len(model.calls) == 1


def test_a_reward_that_is_not_finite_makes_the_sample_fail() -> None:  # B014
    model = FakeLearner(rewards=lambda sample: float("nan") if sample.position else 1.0)
    (scored,) = asyncio.run(add_rewards(model, [group(0)]))
    assert [s.failed for s in scored.samples] == [False, True]
    assert scored.samples[1].failure == "reward: the reward model gave nan"


@pytest.mark.parametrize("placement", [{}, {"train.colocate_all": True}, ASYNC, {"train.colocate_all": True, **ASYNC}])
@pytest.mark.parametrize(("bad", "ends"), [(1, False), (5, True)])
def test_n03_rewards_that_are_not_finite_count_as_failures(placement: dict[str, Any], bad: int, ends: bool) -> None:
    """Of 40 samples, whether they are scored while others generate or after all of them."""
    handles = {f"h{i}" for i in range(bad)}
    model = FakeLearner(rewards=lambda s: float("nan") if s.handle in handles and s.position == 0 else 1.0)
    run = fake_run(10, score=unscored, learner=model, **BATCH_OF_40, **MODEL, **placement)
    if ends:
        with pytest.raises(RolloutFailedError, match=r"5 of \d+ samples failed(?s:.*)the reward model gave nan"):
            run.run()
    else:
        run.run()
        assert len(run.trained()) == 39
        assert run.sink.steps[0]["rollout/failed_samples_reward"] == 1.0


@pytest.mark.parametrize("pipeline", [{}, ASYNC])
def test_b148_a_sample_that_nothing_rewards_fails_and_says_what_to_do(pipeline: dict[str, Any]) -> None:
    agent = {"reward.remote_url": None, "train.agent_func_path": "agent.py", **pipeline}
    with pytest.raises(RolloutFailedError, match=r"samples failed(?s:.*)agent: the sample came back without a reward"):
        fake_run(4, score=unscored, **agent).run()


def test_every_group_is_a_call_of_its_own_in_the_synchronous_pipeline() -> None:
    model = Model()

    async def main() -> list[Group]:
        stream = RewardStream(model, together=False)
        return await asyncio.gather(*(stream.score(group(i)) for i in range(3)))

    assert [rewards(g) for g in asyncio.run(main())] == [[0.0, 1.0]] * 3
    assert model.calls == [["h0", "h0"], ["h1", "h1"], ["h2", "h2"]]


def test_groups_that_wait_share_a_call_in_the_asynchronous_pipeline() -> None:
    model = Model()

    async def main() -> list[Group]:
        stream = RewardStream(model, together=True)
        first = asyncio.create_task(stream.score(group(0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        others = [asyncio.create_task(stream.score(group(i))) for i in (1, 2, 3)]
        await asyncio.sleep(0)
        others[1].cancel()
        done = await asyncio.gather(first, others[0], others[2])
        return [*done, await stream.score(group(4))]

    scored = asyncio.run(asyncio.wait_for(main(), 5))
    assert [(g.handle, rewards(g)) for g in scored] == [(f"h{i}", [0.0, 1.0]) for i in (0, 1, 3, 4)]
    assert [sorted(set(call)) for call in model.calls] == [["h0"], ["h1", "h2", "h3"], ["h4"]]


def test_an_error_of_the_model_reaches_every_group_of_the_call() -> None:
    class Broken(FakeLearner):
        async def score_rewards(self, samples: Sequence[SampleRef]) -> list[float]:
            raise RuntimeError("reward rank 0 died")

    async def main() -> list[Any]:
        stream = RewardStream(Broken(), together=True)
        return await asyncio.gather(*(stream.score(group(i)) for i in range(2)), return_exceptions=True)

    assert [str(e) for e in asyncio.run(main())] == ["reward rank 0 died"] * 2


@pytest.mark.parametrize("pipeline", [{}, ASYNC])
def test_finished_groups_are_scored_while_others_generate(pipeline: dict[str, Any]) -> None:
    scored_beside: list[int] = []
    run = fake_run(
        8,
        score=unscored,
        delay=lambda item: 40 if item.position % 4 == 3 else 2,
        rollout__batch_size=4,
        train__batch_size=8,
        **MODEL,
        **pipeline,
    )
    score = run.learner.score_rewards

    async def score_rewards(samples: Sequence[SampleRef]) -> list[float]:
        scored_beside.append(run.rollout.running)
        return await score(samples)

    run.learner.score_rewards = score_rewards  # type: ignore[method-assign]
    run.run()
    assert len(run.trained()) == 16
    assert scored_beside[0] >= 1
    assert sum(beside > 0 for beside in scored_beside) >= 2


def test_synchronous_rewards_do_not_depend_on_the_order_of_arrival() -> None:
    calls = []
    for seed in range(3):
        rng = random.Random(seed)
        model = Model()
        fake_run(6, score=unscored, delay=lambda item, rng=rng: rng.randint(0, 20), learner=model, **MODEL).run()
        calls.append(sorted(model.calls))
    assert calls == [[[f"h{i}"] * 2 for i in range(6)]] * 3


@pytest.mark.parametrize(
    ("flags", "streams"),
    [
        ({}, True),
        (ASYNC, True),
        ({"rollout.n_samples_per_prompt": 2, "reward.num_gpus_per_node": 4}, False),
        ({"rollout.n_samples_per_prompt": 2, "reward.num_gpus_per_node": 4, **ASYNC}, True),
        ({"train.colocate_all": True}, False),
        ({"train.colocate_critic_reward": True, **ASYNC}, False),
        ({"reward.model_name_or_path": None, "reward.remote_url": "reward.py"}, False),
    ],
)
def test_where_rewards_are_streamed(flags: dict[str, Any], streams: bool) -> None:
    base = {**MODEL, "reward.num_gpus_per_node": 1, "rollout.n_samples_per_prompt": 4}
    config = build(TrainPPOConfig(), base | flags)
    assert (reward_stream(config, FakeLearner()) is not None) is streams
