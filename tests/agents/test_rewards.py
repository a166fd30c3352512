"""Reading results of reward functions, and scoring a group."""

import json
import math
from typing import Any

import pytest

from openrlhf.agents.engine import EngineError
from openrlhf.agents.rewards import (
    RewardError,
    RewardResult,
    normalize_rewards,
    read_extra_logs,
    require_reward,
    reward_label,
)
from openrlhf.agents.testing import run_group
from openrlhf.agents.types import Failure
from openrlhf.utils.agent import SingleTurnExecutor


@pytest.mark.parametrize("rewards", [[1, 0, 1], (1.0, 0.0, 1.0), [True, False, True], [[1], [0], [1]]])
def test_rewards_of_any_form(rewards):  # B131, F12
    for result in (rewards, {"rewards": rewards}):
        read = normalize_rewards(result, 3)
        assert read.rewards == [1.0, 0.0, 1.0]
        assert read.scores == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("value", [1.0, [1.0], (1,), True])
def test_one_sample(value):  # B131, O07
    assert normalize_rewards({"rewards": value}, 1).rewards == [1.0]


@pytest.mark.parametrize("result", [[1.0], [1, 2], [1, 2, 3, 4], 1.0, []])
def test_wrong_count_names_function_and_counts(result):  # B131: never broadcast
    with pytest.raises(ValueError, match=r"grade: rewards .*expected 3"):
        normalize_rewards(result, 3, "grade")


@pytest.mark.parametrize("result", [None, {}, {"scores": [1, 2, 3]}, {"rewards": None}])
def test_no_rewards(result):  # B131
    with pytest.raises(ValueError, match='grade must return a dict with "rewards"'):
        normalize_rewards(result, 3, "grade")


def test_zero_score_is_a_score():  # B055
    read = normalize_rewards({"rewards": [-1.0], "scores": [0.0]}, 1)
    assert (read.rewards, read.scores) == ([-1.0], [0.0])
    assert normalize_rewards({"rewards": [-1.0], "scores": None}, 1).scores == [-1.0]


def test_non_finite_rewards_fail_their_sample_only():  # B134, B014
    read = normalize_rewards({"rewards": [1.0, math.nan, None, math.inf]}, 4)
    assert read.rewards == [1.0, None, None, None]
    assert [f is not None for f in read.failures] == [False, True, True, True]
    assert "nan" in str(read.failures[1])


def test_extra_logs_per_sample_scalar_and_odd():  # B145, B146, O07
    logs = {
        "mean": 0.5,
        "each": [1.0, 2.0],
        "nan": [math.nan, 3.0],
        "text": "x",
        "none": None,
        "odd": [1, 2, 3],
        "mixed": [None, "y"],
        "a/é": [1, 2],
    }
    rows = read_extra_logs(logs, 2, "f")
    assert rows == [{"mean": 0.5, "each": 1.0, "a/é": 1.0}, {"mean": 0.5, "each": 2.0, "nan": 3.0, "a/é": 2.0}]
    json.dumps(rows, allow_nan=False)


def test_extra_logs_as_one_dict_per_sample():  # B145
    assert read_extra_logs([{"a": 1}, {}, {"a": 1, "b": 2}], 3, "f") == [{"a": 1.0}, {}, {"a": 1.0, "b": 2.0}]


@pytest.mark.parametrize(
    ("label", "seen"), [("42", "42"), (42, "42"), (42.5, "42.5"), (True, "true"), (None, None), ({"a": 1}, {"a": 1})]
)
def test_labels(label, seen):
    assert reward_label(label) == seen


class Source:
    """A reward source that keeps its calls."""

    def __init__(self, result):
        self.result = result
        self.calls = []

    async def score(self, queries, prompts, labels, *, responses=None, columns=None) -> Any:
        self.calls.append((queries, prompts, labels, responses))
        result = self.result(len(queries)) if callable(self.result) else self.result
        if isinstance(result, Exception):
            raise result
        return result


def failure(trajectory) -> Failure:
    assert trajectory.failure is not None
    return trajectory.failure


def rewards(*values):
    return normalize_rewards(list(values), len(values))


def test_one_call_per_group():
    source = Source(rewards(0, 1, 2))
    group = run_group(SingleTurnExecutor(source), ["a", "b", "c"], "p", label=4, n_samples=3)
    assert source.calls == [
        (["pa<|end|>", "pb<|end|>", "pc<|end|>"], ["p"] * 3, ["4"] * 3, ["a<|end|>", "b<|end|>", "c<|end|>"])
    ]
    assert [t.reward for t in group] == [0.0, 1.0, 2.0]
    assert [t.score for t in group] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_failed_generations_are_not_scored(broken):  # O03
    answers: list[Any] = ["a", "b", "c"]
    answers[broken] = EngineError("down")
    source = Source(rewards(5, 6))
    group = run_group(SingleTurnExecutor(source), answers, n_samples=3)
    assert [t.reward for t in group if not t.failed] == [5.0, 6.0]
    assert [t.failed for t in group] == [i == broken for i in range(3)]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_failed_reward_fails_its_sample(broken):  # O03, B134
    values = [1.0, 1.0, 1.0]
    values[broken] = math.nan
    group = run_group(SingleTurnExecutor(Source(rewards(*values))), ["a"], n_samples=3)
    assert [t.reward for t in group] == [None if i == broken else 1.0 for i in range(3)]
    assert failure(group[broken]).border == "reward"
    assert group[broken].num_trainable == 0


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (RewardError("reward_func raised KeyError: 'x'", "Traceback: line 3"), "KeyError"),
        (RuntimeError("boom"), "RuntimeError: boom"),
        (rewards(1.0), "1 rewards for 2 samples"),
    ],
)
def test_failed_call_fails_the_group(result, text):
    group = run_group(SingleTurnExecutor(Source(result)), ["a"], n_samples=2)
    assert all(t.failed and t.reward is None for t in group)
    assert text in failure(group[0]).message


def test_without_a_source_samples_come_back_unscored():
    group = run_group(SingleTurnExecutor(), ["a"], n_samples=2)
    assert [(t.reward, t.failed) for t in group] == [(None, False)] * 2


def test_nothing_to_score_makes_no_call():
    source = Source(rewards(1.0))
    run_group(SingleTurnExecutor(source), [EngineError("down")], n_samples=2)
    assert source.calls == []


def test_failure_of_one_sample_by_the_source():
    result = RewardResult(
        rewards=[1.0, None],
        scores=[1.0, None],
        extra_logs=[{"a": 1.0}, {}],
        failures=[None, Failure(border="reward", message="server said no")],
    )
    group = run_group(SingleTurnExecutor(Source(result)), ["a"], n_samples=2)
    assert group[0].extra_logs == {"a": 1.0}
    assert failure(group[1]).message == "server said no"


def test_b148_a_sample_that_nobody_scores_is_failed_by_name():
    (unscored,) = run_group(SingleTurnExecutor(), ["x"])
    assert (unscored.reward, unscored.failed) == (None, False)
    failed = require_reward(unscored)
    assert failed.failure is not None
    assert failed.failure.message.startswith("the agent returned no reward, and there is no reward model")
    assert (failed.failure.border, failed.num_trainable) == ("reward", 0)
    assert require_reward(failed) is failed
