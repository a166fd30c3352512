"""All learner roles over fake ranks: what travels from rank to rank, what the controller sees, who works when."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError

from openrlhf.core.config import AlgoConfig
from openrlhf.launcher.ranks.roles import PolicyRank
from openrlhf.launcher.ray import learner_actor
from openrlhf.launcher.ray.calls import WorkerDiedError
from openrlhf.launcher.ray.learner_group import RayLearner
from openrlhf.launcher.ray.rank_group import RankGroup
from openrlhf.launcher.ray.remote import Remote
from openrlhf.launcher.samples import SampleRef
from openrlhf.learner.spec import Role
from support.toy_ranks import ToyLearner, references, sampled, toy_config

SAMPLES = [SampleRef(handle="h", position=i, index=i, reward=0.0, length=4) for i in range(4)]
SUMS = {"train/loss": (2.0, 4.0)}

FOLLOWING = {"open_stream": 2, "follow": None, "save_followed": {"reference.safetensors": 7}, "load_followed": None}
SAVED = {"rank0.pt": 5}
ANSWERS = {"export": None, "save": SAVED, "load_checkpoint": None, "statistics": (0.5, 2.0), "update": SUMS} | FOLLOWING
LOOKING = {"blind_to": None}
SCALARS = {"metrics": SUMS} | ANSWERS | LOOKING
"""What the controller may fetch, beside the rewards."""


class Tensors:
    """A reference to tensors, or to a batch: the controller may pass it on, never fetch it."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def __await__(self) -> Any:
        raise AssertionError(f"the controller fetched {self.origin}")


class Ready(Tensors):
    """A reference to what stands for a batch: it may be waited for."""

    def __await__(self) -> Any:
        return value(None).__await__()


async def value(content: Any) -> Any:
    return content


class Rank:
    """One rank; notes what it is asked and which references come along."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: self._ask(method, args, kwargs))

    def _ask(self, method: str, args: Any, kwargs: Any) -> Any:
        parts = [*args, *kwargs.get("scores", {}).values(), kwargs.get("returns", [])]
        origins = [r.origin for part in parts for r in (part if isinstance(part, list) else [part]) if is_ref(r)]
        words = [self.name, method, *(a for a in args if isinstance(a, str))]
        self.log.append(" ".join(words) + (f" <- {', '.join(origins)}" if origins else ""))
        if method in SCALARS:
            return value(SCALARS[method])
        if method == "rewards":
            return value({s.index: float(s.index) for share in args[0] for s in share})
        if (self.name, method) == ("policy 1", "next_bucket"):
            return value([])
        kind = Ready if (self.name.split()[0], method) == ("critic", "prepare") else Tensors
        return kind(f"{method} of {self.name}")


def is_ref(thing: Any) -> bool:
    return isinstance(thing, Tensors)


class Push:
    """A weight push that only has the lock."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    def alone(self) -> Any:
        return nullcontext()


def make_ranks(role: str, count: int, log: list[str]) -> list[Remote[Any]]:
    return [Remote(f"{role} {i}", Rank(f"{role} {i}", log)) for i in range(count)]


def make(
    log: list[str], *, take_turns: bool = False, critic_export: bool = False, group: Any = None, **ranks: int
) -> RayLearner:
    groups: dict[str, Any] = {
        role: RankGroup(role=role, ranks=make_ranks(role, count, log), hidden_size=8, **(group or {}))
        for role, count in ranks.items()
    }
    push: Any = Push()
    return RayLearner(push=push, tokenizer_path="T", take_turns=take_turns, critic_export=critic_export, **groups)


def test_the_reference_is_told_what_the_policy_kept() -> None:
    log: list[str] = []
    asyncio.run(make(log, policy=2, reference=1, group={"truncated": True}).prepare([SAMPLES], kl_coef=0.1))
    assert log == [
        "policy 0 sampled",
        "policy 1 sampled",
        "policy 0 kept <- sampled of policy 0",
        "policy 1 kept <- sampled of policy 1",
        "reference 0 logprobs <- kept of policy 0, kept of policy 1",
        "policy 0 prepare <- sampled of policy 0, logprobs of reference 0",
        "policy 1 prepare <- sampled of policy 1, logprobs of reference 0",
        "policy 0 metrics <- prepare of policy 0",
        "policy 1 metrics <- prepare of policy 1",
    ]
    log.clear()
    asyncio.run(make(log, policy=1, group={"truncated": True}).prepare([SAMPLES], kl_coef=0.0))
    assert log == ["policy 0 prepare", "policy 0 metrics <- prepare of policy 0"]


def test_ranks_get_the_parts_that_hold_their_samples_and_no_others() -> None:
    log: list[str] = []
    long_first = [SampleRef(handle="h", position=i, index=i, reward=0.0, length=40 - i) for i in range(4)]
    learner = make(log, policy=5, reference=2)
    assert learner.reference is not None
    held = [[s.index for s in share[0]] for share in learner.reference.shares([long_first])]
    own = [[s.index for s in share[0]] for share in learner.policy.shares([long_first])]
    assert (held, own) == ([[0, 3], [1, 2]], [[0], [1], [2], [3], []])
    asyncio.run(learner.prepare([long_first], kl_coef=0.1))
    of = (0, 1, 1, 0, 0)  # the last rank has no sample, and gets one part all the same
    assert log[2:7] == [f"policy {rank} prepare <- logprobs of reference {of[rank]}" for rank in range(5)]


def test_the_policys_own_ranks_are_the_reference_where_it_has_adapters() -> None:
    log: list[str] = []

    def policy(**group: Any) -> RayLearner:
        ranks = RankGroup[Any](role="policy", ranks=make_ranks("policy", 2, log), hidden_size=8, **group)
        return RayLearner(policy=ranks, reference=ranks, push=Push(), tokenizer_path="T")  # pyright: ignore[reportArgumentType]

    asyncio.run(policy().prepare([SAMPLES], kl_coef=0.1))
    assert log[:4] == [
        "policy 0 logprobs",
        "policy 1 logprobs",
        "policy 0 prepare <- logprobs of policy 0",
        "policy 1 prepare <- logprobs of policy 1",
    ]
    log.clear()
    asyncio.run(policy(truncated=True).prepare([SAMPLES], kl_coef=0.1))
    assert log[4:8] == [
        "policy 0 logprobs <- kept of policy 0",
        "policy 1 logprobs <- kept of policy 1",
        "policy 0 prepare <- sampled of policy 0, logprobs of policy 0",
        "policy 1 prepare <- sampled of policy 1, logprobs of policy 1",
    ]
    assert len(policy().groups) == 1


def test_the_reference_takes_the_policy_bucket_by_bucket() -> None:
    log: list[str] = []
    asyncio.run(make(log, policy=2, reference=1, group={"follows": True}).sync_reference())
    bucket = ["policy 0 next_bucket", "policy 1 next_bucket", "reference 0 follow <- next_bucket of policy 0"]
    assert log == ["policy 0 open_stream", "policy 1 open_stream", *bucket, *bucket]


def test_a_reference_that_moves_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    log: list[str] = []
    still = make(log, policy=1, reference=1)
    moving = make(log, policy=1, reference=2, group={"follows": True})
    asyncio.run(still.save(str(tmp_path / "still")))
    asyncio.run(still.load(str(tmp_path / "still")))
    with pytest.raises(ValueError, match=r"written without --ref.sync_steps: leave out the flag"):
        asyncio.run(moving.load(str(tmp_path / "still")))
    log.clear()
    assert asyncio.run(moving.save("F")) == {"actor/rank0.pt": 5, "ref/reference.safetensors": 7}
    assert log == ["policy 0 save F/actor", "reference 0 save_followed F/ref", "reference 1 save_followed F/ref"]
    (tmp_path / "moved/ref").mkdir(parents=True)
    log.clear()
    asyncio.run(moving.load(str(tmp_path / "moved")))
    assert [line.split()[2] for line in log] == ["load_checkpoint", "load_followed", "load_followed"]
    with pytest.raises(ValueError, match=r"written with --ref.sync_steps: give the flag"):
        asyncio.run(still.load(str(tmp_path / "moved")))


def test_tensors_go_from_rank_to_rank_and_scalars_to_the_controller() -> None:
    log: list[str] = []

    async def main() -> dict[str, float]:
        learner = make(log, policy=2, reference=2, critic=1)
        prepared = await learner.prepare([SAMPLES], kl_coef=0.1)
        await learner.update(prepared, [0], kl_coef=0.1, freeze_actor=[False])
        return prepared.metrics

    assert asyncio.run(main()) == {"train/loss": 0.5}
    assert log == [
        "reference 0 logprobs",
        "reference 1 logprobs",
        "critic 0 values",
        "critic 0 read <- values of critic 0",
        "policy 0 prepare <- logprobs of reference 0, read of critic 0",
        "policy 1 prepare <- logprobs of reference 1, read of critic 0",
        "policy 0 metrics <- prepare of policy 0",
        "policy 1 metrics <- prepare of policy 1",
        "policy 0 returns <- prepare of policy 0",
        "policy 1 returns <- prepare of policy 1",
        "critic 0 prepare <- values of critic 0, returns of policy 0, returns of policy 1",
        "policy 0 update <- prepare of policy 0",
        "policy 1 update <- prepare of policy 1",
        "critic 0 update <- prepare of critic 0",
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
        prepared = await learner.prepare([SAMPLES], kl_coef=0.0)
        log.clear()
        await learner.update(prepared, [0], kl_coef=0.0, freeze_actor=[False])
        return before

    assert asyncio.run(main()) is not take_turns
    turns = [line.partition(" <- ")[0] for line in log]
    assert turns == (["critic 0 update", "policy 0 update"] if take_turns else ["policy 0 update", "critic 0 update"])


def test_a_rank_that_waits_for_a_dead_one_says_whose_result_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any, timeout: float) -> Any:
        raise ActorDiedError

    monkeypatch.setattr(learner_actor, "ray", SimpleNamespace(get=get))
    learner: Any = ToyLearner(Role.POLICY, torch.zeros(2, 2))
    rows = [sampled([0, 1])]

    def resolve(what: str, handles: Any) -> Any:
        return [rows] if what == "samples" else learner_actor._fetch(what, handles)

    policy = PolicyRank(learner, toy_config(AlgoConfig()), resolve)
    with pytest.raises(WorkerDiedError, match="reference log-probs: their rank died"):
        policy.prepare([references(rows, [1.0])], scores={"ref_logprobs": ["r"]}, kl_coef=0.0)


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
        assert await learner.save("/c") == {"actor/rank0.pt": 5, "critic/rank0.pt": 5}
        await learner.load("/c")

    asyncio.run(main())
    saved = ["policy 0 save /c/actor", "critic 0 save /c/critic"]
    assert log == [*saved, "policy 0 load_checkpoint /c/actor", "critic 0 load_checkpoint /c/critic"]


def test_who_writes_checkpoints_is_asked_whether_it_sees_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    both = make(log, policy=2, critic=1, reference=1)
    assert asyncio.run(both.blind_to("/c/mark")) == []
    assert log == ["policy 0 blind_to /c/mark", "policy 1 blind_to /c/mark", "critic 0 blind_to /c/mark"]
    log.clear()
    monkeypatch.setitem(SCALARS, "blind_to", "node2")
    assert asyncio.run(make(log, policy=2, reference=2, group={"follows": True}).blind_to("/c/mark")) == ["node2"]
    assert [line.split()[0] for line in log] == ["policy", "policy", "reference", "reference"]


def test_statistics_of_the_reward_model_come_from_its_first_rank() -> None:
    async def main() -> tuple[float, float] | None:
        return await make([], policy=1, reward=2).reward_statistics()

    assert asyncio.run(main()) == (0.5, 2.0)


def test_ranks_that_hold_one_model_get_the_same_samples() -> None:
    def numbers(ranks_per_sample: int) -> list[list[int]]:
        ranks = make_ranks("policy", 4, [])
        group = RankGroup(role="policy", ranks=ranks, hidden_size=8, ranks_per_sample=ranks_per_sample)
        return [[s.index for s in shares[0]] for shares in group.shares([SAMPLES])]

    assert numbers(1) == [[0], [1], [2], [3]]
    assert numbers(2) == [[0, 2], [0, 2], [1, 3], [1, 3]]
