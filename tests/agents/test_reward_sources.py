"""Several reward sources as one: exact sums, names of sources that fail, counts of each."""

import asyncio
from typing import Any

import pytest

from openrlhf.agents.reward_sources import NamedSource, RewardSources, chosen_sources
from openrlhf.agents.rewards import RewardError, RewardResult, RewardTimeoutError
from openrlhf.agents.testing import run_group
from openrlhf.agents.types import Failure
from openrlhf.utils.agent import SingleTurnExecutor


class Source:
    """Gives every sample its rewards; an exception in their place is raised."""

    def __init__(self, *rewards, logs=(), failures=()):
        self.rewards = rewards
        self.logs = logs
        self.failures = failures

    async def score(self, queries, prompts, labels, **options):
        if isinstance(self.rewards[0], Exception):
            raise self.rewards[0]
        n = len(queries)
        rewards = list(self.rewards) * n if len(self.rewards) == 1 else list(self.rewards)
        return RewardResult(
            rewards=rewards,
            scores=rewards,
            extra_logs=self.logs or [{}] * n,
            failures=self.failures or [None] * n,
        )


def scored(sources, n=2) -> tuple[Any, dict[str, float]]:
    """The result or the error of one group, and the counts afterwards."""
    together = RewardSources(sources)

    async def ask():
        try:
            return await together.score(["q"] * n, ["p"] * n, ["l"] * n)
        except RewardError as error:
            return error

    return asyncio.run(ask()), together.totals()


def test_weighted_sums_are_exactly_rounded():
    sources = [
        NamedSource(name=name, source=Source(value, value), weight=weight)
        for name, value, weight in (("a", 1e16, 1.0), ("b", 1.0, 1.0), ("c", -1e16, 1.0), ("d", 4.0, 0.25))
    ]
    result, totals = scored(sources)
    assert result.rewards == result.scores == [2.0, 2.0]
    assert result.extra_logs[0] == {"a/reward": 1e16, "b/reward": 1.0, "c/reward": -1e16, "d/reward": 4.0}
    assert {key: value for key, value in totals.items() if key.startswith("d/") and key != "d/seconds"} == {
        "d/calls": 1,
        "d/samples": 2,
        "d/failures": 0,
    }


def test_what_sources_log_keeps_their_names():
    first = Source(1.0, 2.0, logs=[{"length": 3.0}, {"length": 4.0}])
    result, _ = scored([NamedSource(name="a", source=first), NamedSource(name="b", source=Source(5.0), weight=0.0)])
    assert result.rewards == [1.0, 2.0]
    assert result.extra_logs[1] == {"a/reward": 2.0, "a/length": 4.0, "b/reward": 5.0}


def test_a_source_alone_without_a_name_is_itself():
    result, totals = scored([NamedSource(name="", source=Source(0.1, 0.2, logs=[{"x": 1.0}, {}]))])
    assert result.rewards == [0.1, 0.2]
    assert result.extra_logs == [{"x": 1.0}, {}]
    assert totals["calls"] == 1


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RewardTimeoutError("too slow", "trace"), RewardTimeoutError, "reward source 'b': too slow"),
        (RewardError("broken"), RewardError, "reward source 'b': broken"),
        (ValueError("odd"), RewardError, "reward source 'b': ValueError: odd"),
    ],
)
def test_a_source_that_fails_is_named_and_fails_the_group(error, kind, message):
    result, totals = scored([NamedSource(name="a", source=Source(1.0)), NamedSource(name="b", source=Source(error))])
    assert type(result) is kind
    assert str(result) == message
    assert result.traceback == getattr(error, "traceback", "")
    assert (totals["a/failures"], totals["b/failures"], totals["b/calls"]) == (0, 2, 1)


def test_a_wrong_number_of_rewards_is_the_sources_failure():
    result, _ = scored([NamedSource(name="a", source=Source(1.0, 2.0, 3.0))])
    assert "reward source 'a': ValueError: it returned 3 rewards for 2 samples" in str(result)


def test_a_sample_that_one_source_fails_has_failed():
    failures = [None, Failure(border="reward", message="no number")]
    second = Source(1.0, None, failures=failures)
    result, totals = scored([NamedSource(name="a", source=Source(1.0)), NamedSource(name="b", source=second)])
    assert result.rewards == [2.0, None]
    assert result.failures[1] == Failure(border="reward", message="reward source 'b': no number")
    assert totals["b/failures"] == 1


def test_only_the_group_of_a_failing_source_fails():
    class Once(Source):
        async def score(self, queries, prompts, labels, **options):
            if prompts[0] == "bad":
                raise RewardError("away")
            return await super().score(queries, prompts, labels, **options)

    together = RewardSources([NamedSource(name="a", source=Source(1.0)), NamedSource(name="b", source=Once(0.5))])
    executor = SingleTurnExecutor(together)
    good, bad = (run_group(executor, ["x", "y"], prompt, n_samples=2) for prompt in ("good", "bad"))
    assert [t.reward for t in good] == [1.5, 1.5]
    assert [t.failure and t.failure.message for t in bad] == ["reward source 'b': away"] * 2


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, ["math", "code"]),
        ("", ["math", "code"]),
        ("code", ["code"]),
        ("code, math", ["math", "code"]),
        (["code"], ["code"]),
    ],
)
def test_a_rows_value_names_its_sources(value, chosen):
    assert chosen_sources(value, ["math", "code"]) == chosen


@pytest.mark.parametrize("value", ["maths", "math,", ["math", "other"], [], 3])
def test_a_value_that_names_no_source_is_refused(value):
    with pytest.raises(ValueError, match="names no reward source: there are math, code"):
        chosen_sources(value, ["math", "code"])


def test_a_column_chooses_the_sources_of_a_group():
    names = ("math", "code")
    seen = []

    class Seen(Source):
        def __init__(self, name):
            super().__init__(1.0)
            self.name = name

        async def score(self, queries, prompts, labels, *, columns=None, **options):
            assert columns is not None
            seen.append((self.name, columns["kind"][0]))
            return await super().score(queries, prompts, labels)

    sources = RewardSources([NamedSource(name=n, source=Seen(n), weight=2.0) for n in names], choose_by="kind")

    def rewards(kind):
        return asyncio.run(sources.score(["q"] * 2, ["p"] * 2, ["l"] * 2, columns={"kind": [kind] * 2})).rewards

    assert [rewards("math"), rewards(["code"]), rewards(None)] == [[2.0] * 2, [2.0] * 2, [4.0] * 2]
    assert seen == [("math", "math"), ("code", ["code"]), ("math", None), ("code", None)]
    assert sources.totals()["math/calls"] == sources.totals()["code/calls"] == 2
    with pytest.raises(ValueError, match="'other' names no reward source"):
        rewards("other")
