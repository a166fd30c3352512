"""All learner roles over fake ranks: what travels from rank to rank, what the controller sees, who works when."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from openrlhf.launcher.ray import learner_actor
from openrlhf.launcher.ray.calls import WorkerDiedError
from openrlhf.launcher.ray.learner_group import RayLearner
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.trainer.protocols import SampleRef

SAMPLES = [SampleRef(handle="h", position=i, index=i, reward=0.0, length=4) for i in range(4)]
SUMS = {"train/loss": (2.0, 4.0)}

ANSWERS = {"export": None, "save": None, "load_checkpoint": None, "reward_statistics": (0.5, 2.0)}


class Tensors:
    """A reference to tensors: the controller may pass it on, never fetch it."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def __await__(self) -> Any:
        raise AssertionError(f"the controller fetched {self.origin}")


class Method:
    def __init__(self, call: Any) -> None:
        self.remote = call

    def options(self, **_: Any) -> Method:
        return self


async def value(content: Any) -> Any:
    return content


class Rank:
    """One rank; notes what it is asked and which references come along."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.call, self.merged = Method(self._call), Method(self._merged)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.log.append(" ".join([self.name, method, *(a for a in args if isinstance(a, str))]))
        if method in ANSWERS:
            return value(ANSWERS[method])
        if method == "rewards":
            return value({s.index: float(s.index) for share in args[0] for s in share})
        return value(SUMS) if method == "update" else Tensors(f"{method} of {self.name}")

    def _merged(self, method: str, *args: Any, parts: dict[str, Any], **kwargs: Any) -> Any:
        origins = [part.origin for refs in parts.values() for part in refs]
        self.log.append(f"{self.name} {method} <- {', '.join(origins)}")
        if method == "prepare":
            return value(SUMS), Tensors(f"returns of {self.name}")
        return value(None)


class Push:
    """A weight push that only has the lock."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    def alone(self) -> Any:
        return nullcontext()


def make(log: list[str], *, take_turns: bool = False, critic_export: bool = False, **ranks: int) -> RayLearner:
    groups: dict[str, Any] = {
        role: RankGroup(role=role, actors=[Rank(f"{role} {i}", log) for i in range(count)], hidden_size=8)
        for role, count in ranks.items()
    }
    push: Any = Push()
    return RayLearner(push=push, tokenizer_path="T", take_turns=take_turns, critic_export=critic_export, **groups)


def test_tensors_go_from_rank_to_rank_and_scalars_to_the_controller() -> None:
    log: list[str] = []

    async def main() -> dict[str, float]:
        learner = make(log, policy=2, reference=2, critic=1)
        return await learner.prepare([SAMPLES], kl_coef=0.1)

    assert asyncio.run(main()) == {"train/loss": 0.5}
    assert log == [
        "reference 0 logprobs",
        "reference 1 logprobs",
        "critic 0 values",
        "policy 0 prepare <- logprobs of reference 0, values of critic 0",
        "policy 1 prepare <- logprobs of reference 1, values of critic 0",
        "critic 0 set_returns <- returns of policy 0, returns of policy 1",
    ]


def test_rewards_come_back_in_the_order_of_the_samples() -> None:
    log: list[str] = []

    async def main() -> list[float]:
        return await make(log, policy=1, reward=2).score_rewards(SAMPLES[::-1])

    assert asyncio.run(main()) == [3.0, 2.0, 1.0, 0.0]
    assert log == ["reward 0 rewards", "reward 1 rewards"]


@pytest.mark.parametrize("take_turns", [False, True])
def test_roles_that_share_devices_take_turns(take_turns: bool) -> None:
    log: list[str] = []

    async def main() -> bool:
        learner = make(log, take_turns=take_turns, policy=1, critic=1, reward=1)
        async with learner._push.lock:  # an update, or weights that travel
            scoring = asyncio.create_task(learner.score_rewards(SAMPLES))
            for _ in range(10):
                await asyncio.sleep(0)
            before = scoring.done()
        await scoring
        await learner.update([0], kl_coef=0.0, freeze_actor=[False])
        return before

    assert asyncio.run(main()) is not take_turns
    assert log[1:] == (["critic 0 update", "policy 0 update"] if take_turns else ["policy 0 update", "critic 0 update"])


def test_a_rank_that_waits_for_a_dead_one_says_whose_result_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any, timeout: float) -> Any:
        raise ActorDiedError

    monkeypatch.setattr(learner_actor, "ray", SimpleNamespace(get=get))
    parts: Any = {"refs": ["r"], "values": []}
    with pytest.raises(WorkerDiedError, match="reference log-probs: their rank died"):
        learner_actor.LearnerActor().merged("prepare", parts=parts, kl_coef=0.0)


@pytest.mark.parametrize("critic_export", [False, True])
def test_critic_is_exported_on_request(critic_export: bool) -> None:
    log: list[str] = []

    async def main() -> None:
        await make(log, critic_export=critic_export, policy=1, critic=1).export("/out/")

    asyncio.run(main())
    assert log == ["policy 0 export /out/ T", *(["critic 0 export /out_critic T"] if critic_export else [])]


def test_both_trained_models_are_saved_and_restored() -> None:
    log: list[str] = []

    async def main() -> None:
        learner = make(log, policy=1, critic=1, reference=1)
        await learner.save("/c")
        await learner.load("/c")

    asyncio.run(main())
    saved = ["policy 0 save /c/actor", "critic 0 save /c/critic"]
    assert log == [*saved, "policy 0 load_checkpoint /c/actor", "critic 0 load_checkpoint /c/critic"]


def test_statistics_of_the_reward_model_come_from_its_first_rank() -> None:
    async def main() -> tuple[float, float] | None:
        return await make([], policy=1, reward=2).reward_statistics()

    assert asyncio.run(main()) == (0.5, 2.0)


def test_ranks_that_hold_one_model_get_the_same_samples() -> None:
    def numbers(tensor_parallel: int) -> list[list[int]]:
        ranks = [Rank(f"policy {i}", []) for i in range(4)]
        group = RankGroup(role="policy", actors=ranks, hidden_size=8, tensor_parallel=tensor_parallel)
        return [[s.index for s in shares[0]] for shares in group.shares([SAMPLES])]

    assert numbers(1) == [[0], [1], [2], [3]]
    assert numbers(2) == [[0, 2], [0, 2], [1, 3], [1, 3]]
