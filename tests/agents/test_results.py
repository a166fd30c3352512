"""What `execute` returns, as trajectories: which call sampled which range, and whose lists they are."""

from dataclasses import replace

import pytest

from openrlhf.agents.context import SampleEngine
from openrlhf.agents.engine import Generation
from openrlhf.agents.recorder import Outcome, Recorder
from openrlhf.agents.results import as_trajectories
from openrlhf.agents.testing import ScriptedEngine
from openrlhf.agents.types import PromptItem, StopReason

ITEM = PromptItem(group_id="g", prompt="p")


def generation(ids, version, finish="stop"):
    return Generation(
        token_ids=ids, logprobs=[-version / 10] * len(ids), versions=[version] * len(ids), finish_reason=finish
    )


def trajectory(tokens, ranges, calls, **changes):
    engine = SampleEngine(ScriptedEngine(["x"]))
    engine.calls = calls
    result = {"observation_tokens": tokens, "action_ranges": ranges, "reward": 1.0, **changes}
    (found,) = as_trajectories(result, ITEM, engine, 100)
    return found


def test_n13_an_empty_range_leaves_the_next_call_alone():
    t = trajectory([1, 7, 8], [(1, 1), (1, 3)], [generation([7, 8], 3)])
    assert (t.trainable, t.versions, t.logprobs) == ([0, 1, 1], [-1, 3, 3], [0.0, -0.3, -0.3])
    assert [(turn.start, turn.end) for turn in t.turns] == [(1, 1), (1, 3)]


def test_n13_an_empty_range_takes_its_own_empty_call():
    calls = [generation([7], 1), generation([], 2, "length"), generation([7], 3)]
    t = trajectory([1, 7, 7], [(1, 2), (2, 2), (2, 3)], calls)
    assert t.versions == [-1, 1, 3]
    assert [turn.finish_reason for turn in t.turns] == ["stop", "length", "stop"]


def test_n13_an_empty_range_with_given_logprobs():
    t = trajectory([1, 7], [(1, 1), (1, 2)], [generation([7], 3)], rollout_log_probs=[0.0, -0.5])
    assert (t.versions, t.logprobs) == ([-1, 3], [0.0, -0.5])


TWO = ([1, 7, 2, 8], [(1, 2), (3, 4)], [generation([7], 0), generation([8], 0)])


@pytest.mark.parametrize("given", [{"reward": None}, {"reward": 0.75}])
def test_rewards_of_turns_add_up_to_the_reward(given):
    t = trajectory(*TWO, turn_rewards=[0.5, 0.25], **given)
    assert (t.reward, t.score, [turn.reward for turn in t.turns]) == (0.75, 0.75, [0.5, 0.25])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0.5], 'returned 1 "turn_rewards" for 2 turns'),
        ([0.5, float("nan")], "no finite numbers"),
        ([0.5, None], "no finite numbers"),
        ([0.5, "much"], "must be one number"),
        ([0.5, 1.5], "beside turn rewards that add up to 2.0"),
    ],
)
def test_wrong_rewards_of_turns(rewards, message):
    with pytest.raises(ValueError, match=message):
        trajectory(*TWO, turn_rewards=rewards)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"reward": float("inf")}, "no finite numbers"), ({"start": 0, "reward": 1.0}, "follow one")],
)
def test_turns_of_a_trajectory_are_looked_at(changes, message):
    recorder = Recorder([1])
    for part in TWO[2]:
        recorder.append_sampled(part)
    finished = recorder.finish(ITEM, 0, Outcome(stop_reason=StopReason.DONE, reward=1.0))
    wrong = replace(finished, turns=[finished.turns[0], replace(finished.turns[1], **changes)])
    with pytest.raises(ValueError, match=message):
        as_trajectories(wrong, ITEM, SampleEngine(ScriptedEngine(["x"])), 100)


@pytest.mark.parametrize("wrap", ["recorder", "trajectory"])
def test_n13_a_late_append_does_not_reach_the_trajectory(wrap):
    recorder = Recorder([1])
    recorder.append_sampled(generation([2], 0))
    finished = recorder.finish(ITEM, 0, Outcome(stop_reason=StopReason.DONE, reward=1.0))
    if wrap == "trajectory":  # an author keeps the lists
        lists = {name: list(getattr(finished, name)) for name in ("token_ids", "trainable", "logprobs", "versions")}
        engine = SampleEngine(ScriptedEngine(["x"]))
        (finished,) = as_trajectories(type(finished)(**{**fields(finished), **lists}), ITEM, engine, 100)
        for values in lists.values():
            values.append(9)
    recorder.append_sampled(generation([3], 1))
    recorder.append_environment([4])
    assert (finished.token_ids, finished.trainable, finished.versions) == ([1, 2], [0, 1], [-1, 0])
    assert len(finished.logprobs) == 2


def fields(trajectory):
    return {name: getattr(trajectory, name) for name in type(trajectory).__slots__}
