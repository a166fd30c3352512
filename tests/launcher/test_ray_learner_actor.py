"""A rank's process: what happens around the work of its role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf.core.batch import Batch
from openrlhf.launcher.ranks.batches import RankBatch
from openrlhf.launcher.ray.learner_actor import Kept, PolicyActor
from openrlhf.launcher.threads import RankThreads


def prepared(tokens: int) -> RankBatch:
    mask = torch.ones(1, tokens, dtype=torch.bool)
    batch = Batch(tokens=mask.long(), attention_mask=mask, action_mask=mask, index=torch.zeros(1, dtype=torch.long))
    return RankBatch(batch=batch, rows=[[0]])


def rank(log: list[str], *, fails: bool = False) -> Any:
    """An actor whose role and learner only note that they were called; a batch has as many tokens as asked for."""

    def prepare(shares: Any, **scores: Any) -> RankBatch:
        log.append("work")
        if fails:
            raise RuntimeError("broken")
        return prepared(len(shares))

    learner = SimpleNamespace(
        give_back=lambda: log.append("give back"), named_parameter_buckets=lambda *args, **kwargs: iter(())
    )
    actor: Any = PolicyActor()
    actor.role = SimpleNamespace(
        learner=learner,
        prepare=prepare,
        update=lambda batch, order, **options: {"tokens": (float(batch.batch.tokens.shape[1]), 1.0)},
    )
    actor.sender, actor.plan, actor.bucket_bytes, actor.skip_frozen, actor.form = None, "plan", 1, False, "merged"
    return actor


def test_memory_is_given_back_after_every_phase() -> None:
    log: list[str] = []
    actor = rank(log)
    batch = actor.prepare([1, 2], scores={}, kl_coef=0.0)
    actor.update(batch, [0], kl_coef=0.0)
    actor.push(1)
    assert log == ["work", "give back", "give back", "give back"]


def test_also_after_a_failure() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match="broken"):
        rank(log, fails=True).prepare([])
    assert log == ["work", "give back"]


def test_a_batch_stays_in_its_rank() -> None:
    actor = rank([])
    first = actor.prepare([1, 2, 3])
    assert first == Kept(1)  # what travels holds no tensor
    assert actor.update(first, [0]) == {"tokens": (3.0, 1.0)}
    second = actor.prepare([1, 2])
    assert actor.update(second, [0]) == {"tokens": (2.0, 1.0)}
    with pytest.raises(AssertionError, match="batch 1 is gone: 2 were prepared since"):
        actor.update(first, [0])


@pytest.mark.parametrize(("threads", "seen"), [(RankThreads(score=3, update=2), [3, 2, 3]), (None, [1, 1, 1])])
def test_a_rank_has_the_threads_of_what_it_does(threads: RankThreads | None, seen: list[int]) -> None:
    counts: list[int] = []
    actor = rank([])
    actor.threads = threads
    actor.role.update = lambda batch, order: counts.append(torch.get_num_threads())
    actor.role.prepare = actor.role.logprobs = lambda shares: counts.append(torch.get_num_threads())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        actor.prepare([])
        actor.update(None, [0])
        actor.logprobs([])
    finally:
        torch.set_num_threads(before)
    assert counts == seen
