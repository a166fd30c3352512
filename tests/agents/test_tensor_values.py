"""Tensors and arrays where authors return them: the package reads them without importing their libraries."""

import pytest

from openrlhf.agents.rewards import normalize_rewards, read_extra_logs
from openrlhf.agents.testing import run_episode
from openrlhf.agents.values import finite_logs, to_float, to_floats
from support.agents_episodes import agent, last, more

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

ONE = [np.float32(1), np.array(1), np.array([1]), torch.tensor(1), torch.tensor([1.0]), torch.tensor([[1.0]])]


@pytest.mark.parametrize("value", [*ONE, torch.tensor(1, dtype=torch.bfloat16), torch.tensor(1.0, requires_grad=True)])
def test_one_number_of_any_type(value):  # O05, O07, B131
    assert to_float(value, "rewards") == 1.0
    assert normalize_rewards({"rewards": value}, 1).rewards == [1.0]


def test_two_numbers_are_not_one():
    with pytest.raises(ValueError, match="rewards must be one number"):
        to_float(torch.tensor([1.0, 2.0]), "rewards")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_vectors_of_any_dtype(dtype):  # B131
    assert to_floats(torch.tensor([1, 0, 1]).to(dtype), 3, "rewards") == [1.0, 0.0, 1.0]


def test_vectors_of_other_shapes():  # B131
    assert to_floats(torch.ones(3, 1), 3, "rewards") == [1.0, 1.0, 1.0]
    assert to_floats(torch.ones(1, 1), 1, "rewards") == [1.0]


@pytest.mark.parametrize("rewards", [torch.tensor([1.0, 0.0, 1.0]), np.array([1, 0, 1])])
def test_rewards_of_a_group(rewards):  # B131, F12
    for result in (rewards, {"rewards": rewards}):
        assert normalize_rewards(result, 3).rewards == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", [torch.tensor(1.0), torch.ones(1), np.array(1.0)])
def test_one_tensor_is_never_broadcast(reward):  # B131
    with pytest.raises(ValueError, match=r"grade: rewards .*expected 3"):
        normalize_rewards(reward, 3, "grade")


def test_extra_logs():  # B145, B146, O07
    logs = {"mean": torch.tensor(0.5), "each": torch.tensor([1.0, 2.0])}
    assert read_extra_logs(logs, 2, "f") == [{"mean": 0.5, "each": 1.0}, {"mean": 0.5, "each": 2.0}]
    assert finite_logs({"b": torch.tensor([0.5]), "c": np.float64("nan")}) == {"b": 0.5}


@pytest.mark.parametrize("reward", ONE)
def test_steps_may_return_tensors(reward):  # O05
    t = run_episode(agent(more(rewards=torch.tensor(0)), last(reward, scores=reward)), ["x"])
    assert (t.reward, t.score) == (1.0, 1.0)
