"""A rank's process: what happens around the work of its trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.launcher.ray.learner_actor import LearnerActor


def rank(log: list[str], *, fails: bool = False) -> Any:
    """An actor whose trainer and learner only note that they were called."""

    def work(*args: object, **kwargs: object) -> str:
        log.append("work")
        if fails:
            raise RuntimeError("broken")
        return "done"

    learner = SimpleNamespace(
        give_back=lambda: log.append("give back"), named_parameter_buckets=lambda *args, **kwargs: iter(())
    )
    actor: Any = LearnerActor()
    actor.trainer = SimpleNamespace(learner=learner, logprobs=work, prepare=work)
    actor.sender, actor.plan, actor.bucket_bytes, actor.skip_frozen, actor.everywhere = None, "plan", 1, False, False
    return actor


def test_memory_is_given_back_after_every_phase() -> None:
    log: list[str] = []
    actor = rank(log)
    assert actor.call("logprobs", []) == "done"
    assert actor.merged("prepare", [], parts={}, kl_coef=0.0) == "done"
    actor.push(1)
    assert log == ["work", "give back", "work", "give back", "give back"]


def test_also_after_a_failure() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match="broken"):
        rank(log, fails=True).call("logprobs", [])
    assert log == ["work", "give back"]
